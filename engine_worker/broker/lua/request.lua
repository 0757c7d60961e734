-- Fragment: what every verb knows of one request. Included by the verbs, never called by itself.
--
-- KEYS[1] is the model's key prefix, `weir:{m:MODEL}:`; all keys derive from it (see keys.py).
-- `now` is the server's clock in Unix milliseconds, the only clock that counts here.
-- A request moves: queued -> running -> finished, or back from running to queued.
-- MessagePack built here speaks protocol version 1 of engine_worker/protocol.py.

local prefix = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local to_publish = {} -- channel -> chunks, in order

local function request_key(id) return prefix .. 'req:' .. id end
local function log_key(id) return prefix .. 'log:' .. id end

-- The request as a table of numbers and strings, or nil when unknown.
local function find(id)
  local f = redis.call('HMGET', request_key(id), 'state', 'rank', 'tenant', 'arrival', 'deadline', 'epoch',
    'attempts', 'tokens', 'channels', 'cancel', 'created', 'max_attempts', 'retention')
  if not f[1] then return nil end
  return {
    id = id, state = f[1], rank = f[2], tenant = f[3], arrival = f[4], deadline = tonumber(f[5]),
    epoch = tonumber(f[6]), attempts = tonumber(f[7]), tokens = tonumber(f[8]), channels = f[9],
    cancel = f[10] == '1', created = tonumber(f[11]), max_attempts = tonumber(f[12]), retention = f[13],
  }
end

-- Whose turn it is within a tier: for now the tenant whose oldest request came first.
local function set_turn(rank, tenant)
  local head = redis.call('ZRANGE', prefix .. 'line:' .. rank .. ':' .. tenant, 0, 0, 'WITHSCORES')
  if head[1] then
    redis.call('ZADD', prefix .. 'turns:' .. rank, head[2], tenant)
  else
    redis.call('ZREM', prefix .. 'turns:' .. rank, tenant)
  end
end

-- A request that comes back keeps its arrival number, and so stands before all that came after it.
local function join_queue(request)
  redis.call('ZADD', prefix .. 'tiers', request.rank, request.rank)
  redis.call('ZADD', prefix .. 'tier:' .. request.rank, request.arrival, request.id)
  redis.call('ZADD', prefix .. 'line:' .. request.rank .. ':' .. request.tenant, request.arrival, request.id)
  redis.call('ZADD', prefix .. 'deadlines', request.deadline, request.id)
  set_turn(request.rank, request.tenant)
  -- Bounded: more tokens than idle workers only cost empty claims.
  redis.call('LPUSH', prefix .. 'wake', 1)
  redis.call('LTRIM', prefix .. 'wake', 0, 15)
  redis.call('PEXPIRE', prefix .. 'wake', 60000)
end

local function leave_queue(request)
  local tier = prefix .. 'tier:' .. request.rank
  redis.call('ZREM', tier, request.id)
  redis.call('ZREM', prefix .. 'line:' .. request.rank .. ':' .. request.tenant, request.id)
  redis.call('ZREM', prefix .. 'deadlines', request.id)
  set_turn(request.rank, request.tenant)
  if redis.call('EXISTS', tier) == 0 then redis.call('ZREM', prefix .. 'tiers', request.rank) end
end

-- How many requests go before this queued one.
local function position(request)
  local ahead = redis.call('ZRANK', prefix .. 'tier:' .. request.rank, request.id) or 0
  for _, rank in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'tiers', '-inf', '(' .. request.rank)) do
    ahead = ahead + redis.call('ZCARD', prefix .. 'tier:' .. rank)
  end
  return ahead
end

local function tell(channels, chunk)
  for channel in string.gmatch(channels, '[^\n]+') do
    local chunks = to_publish[channel]
    if not chunks then
      chunks = {}
      to_publish[channel] = chunks
    end
    chunks[#chunks + 1] = chunk
  end
end

-- One message per channel: a MessagePack array of the chunks told in this call.
local function publish_told()
  for channel, chunks in pairs(to_publish) do
    local n = #chunks
    local header = n < 16 and string.char(0x90 + n) or string.char(0xdc, math.floor(n / 256), n % 256)
    redis.call('PUBLISH', channel, header .. table.concat(chunks))
  end
end

-- The one end of every request, whatever brought it: final log entry, usage event, lease released,
-- TTLs set. `finish` is the protocol's Finish as a table; `chunk` the worker's own final chunk, if any.
local function finish(request, outcome, chunk)
  local id = request.id
  if not chunk then
    chunk = cmsgpack.pack({ request_id = id, epoch = request.epoch, seq = request.tokens, finish = outcome, v = 1 })
  end
  redis.call('RPUSH', log_key(id), chunk)
  tell(request.channels, chunk)

  local more = redis.call('HMGET', request_key(id), 'usage', 'claimed', 'first_token', 'worker')
  local usage = cmsgpack.unpack(more[1])
  if not more[2] then usage.prompt_tokens = 0 end  -- no worker touched it: nothing was computed
  usage.finish_reason = outcome.reason
  usage.completion_tokens = outcome.completion_tokens
  usage.cached_tokens = outcome.cached_tokens or 0
  usage.error_code = outcome.error and outcome.error.code or nil
  usage.created_at_ms = request.created
  usage.finished_at_ms = now
  usage.claimed_at_ms = tonumber(more[2] or nil)
  usage.first_token_at_ms = tonumber(more[3] or nil)
  usage.worker_id = more[4] or nil
  usage.attempts = request.attempts
  redis.call('XADD', prefix .. 'usage', '*', 'e', cmsgpack.pack(usage))

  redis.call('HSET', request_key(id), 'state', 'finished')
  -- The prompt is no longer needed, and is the client's.
  redis.call('HDEL', request_key(id), 'body', 'usage')
  redis.call('ZREM', prefix .. 'leases', id)
  redis.call('PEXPIRE', request_key(id), request.retention)
  redis.call('PEXPIRE', log_key(id), request.retention)
end

-- An end that no worker wrote.
local function finish_as(request, reason, code, message)
  local stored = redis.call('HMGET', request_key(request.id), 'prompt_tokens', 'claimed')
  finish(request, {
    reason = reason,
    prompt_tokens = stored[2] and tonumber(stored[1]) or 0,
    completion_tokens = request.tokens,
    error = code and { code = code, message = message } or nil,
  })
end

-- A running request loses its worker: ended if its time or its attempts are over, else queued again.
-- Returns 'finished' or 'queued'.
local function give_back(request, code, message)
  if request.cancel then
    finish_as(request, 'cancelled')
  elseif request.deadline <= now then
    finish_as(request, 'deadline')
  elseif request.attempts >= request.max_attempts then
    finish_as(request, 'error', code, message)
  else
    redis.call('ZREM', prefix .. 'leases', request.id)
    redis.call('HSET', request_key(request.id), 'state', 'queued', 'attempts', request.attempts)
    join_queue(request)
    return 'queued'
  end
  return 'finished'
end
