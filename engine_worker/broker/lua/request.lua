-- Fragment: what every verb knows of one request. Included by the verbs, never called by itself.
--
-- KEYS[1] is the model's key prefix, `weir:{m:MODEL}:`; all keys derive from it (see keys.py).
-- `now` is the server's clock in Unix milliseconds, the only clock that counts here.
-- A request moves: queued -> running -> finished; back from running to queued; or, its attempts used
-- up, to dead, from where an operator can queue it again or let it go (finished).
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
    'attempts', 'tokens', 'channels', 'cancel', 'created', 'max_attempts', 'retention', 'prompt_tokens',
    'weight', 'max_wait', 'lives', 'billed', 'charged', 'max_output', 'at_workers', 'worker', 'usage', 'claimed',
    'first_token', 'decision')
  if not f[1] then return nil end
  return {
    id = id, state = f[1], rank = f[2], tenant = f[3], arrival = f[4], deadline = tonumber(f[5]),
    epoch = tonumber(f[6]), attempts = tonumber(f[7]), tokens = tonumber(f[8]), channels = f[9],
    cancel = f[10] == '1', created = tonumber(f[11]), max_attempts = tonumber(f[12]), retention = f[13],
    prompt_tokens = tonumber(f[14]), weight = tonumber(f[15] or 1), max_wait = tonumber(f[16] or 3600000),
    lives = tonumber(f[17] or 1), billed = tonumber(f[18] or 0), charged = tonumber(f[19] or f[8]),
    max_output = tonumber(f[20] or 0), at_workers = tonumber(f[21] or 0), worker = f[22], usage = f[23],
    claimed = tonumber(f[24] or nil), first_token = tonumber(f[25] or nil), decision = f[26] or '',
  }
end

--@include fair
--@include queue

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
-- TTLs set. `outcome` is the protocol's Finish as a table; `chunk` the worker's own final chunk, if any. The request
-- knows best how many tokens it has, and its `first_token` when the last chunk brings it.
-- A dead request keeps its body, and all of it for longer: an operator may want it to live again. What
-- it makes then is billed apart, under a name that says so.
local DEAD_KEPT = 86400000

local function finish(request, outcome, chunk, is_dead)
  local id = request.id
  if not chunk then
    chunk = cmsgpack.pack({ request_id = id, epoch = request.epoch, seq = request.tokens, finish = outcome, v = 1 })
  end
  redis.call('RPUSH', log_key(id), chunk)
  tell(request.channels, chunk)

  local usage = cmsgpack.unpack(request.usage)
  if request.epoch == 0 then usage.prompt_tokens = 0 end -- no worker touched it: nothing was computed
  usage.finish_reason = outcome.reason
  usage.completion_tokens = outcome.completion_tokens - request.billed
  usage.cached_tokens = outcome.cached_tokens or 0
  if request.lives > 1 then
    usage.request_id, usage.prompt_tokens, usage.cached_tokens = id .. '~' .. request.lives, 0, 0
  end
  usage.error_code = outcome.error and outcome.error.code or nil
  usage.error_message = outcome.error and outcome.error.message or nil
  usage.created_at_ms = request.created
  usage.finished_at_ms = now
  usage.claimed_at_ms = request.claimed
  usage.first_token_at_ms = request.first_token
  usage.worker_id = request.worker or nil
  if request.decision ~= '' then usage.decision = request.decision end
  usage.attempts = request.attempts
  local event = redis.call('XADD', prefix .. 'usage', '*', 'e', cmsgpack.pack(usage))

  local owed = owed_for_output(request, request.tokens)
  if outcome.cached_tokens then owed = owed - cost(W_IN * outcome.cached_tokens, request.weight) end
  charge(request.rank, request.tenant, owed)
  if request.epoch > 0 then learn_length(request) end
  redis.call('ZREM', prefix .. 'leases', id)
  local fields = { 'tokens', request.tokens, 'charged', request.charged, 'event', event, 'ended', now }
  if request.first_token then fields[9], fields[10] = 'first_token', request.first_token end
  local kept = request.retention
  if is_dead then
    kept = DEAD_KEPT
    redis.call('HSET', request_key(id), 'state', 'dead', 'attempts', request.attempts, unpack(fields))
    redis.call('ZADD', prefix .. 'dead', now, id)
    redis.call('PEXPIRE', prefix .. 'dead', DEAD_KEPT)
  else
    -- The prompt is no longer needed, and is the client's.
    redis.call('HSET', request_key(id), 'state', 'finished', 'body', '', 'usage', '', 'decision', '', unpack(fields))
  end
  redis.call('PEXPIRE', request_key(id), kept)
  redis.call('PEXPIRE', log_key(id), kept)
end

-- An end that no worker wrote.
local function finish_as(request, reason, code, message, is_dead)
  finish(request, {
    reason = reason,
    prompt_tokens = request.epoch > 0 and request.prompt_tokens or 0, -- unclaimed: nothing was computed
    completion_tokens = request.tokens,
    error = code and { code = code, message = message } or nil,
  }, nil, is_dead)
end

-- A running request loses its worker: ended if its time or its attempts are over, else queued again;
-- at once when the attempt did not fail, after a back-off when it did. `heard` is when its worker last
-- was there: what came after, and what came before its claim, it has waited. Returns 'finished' or 'queued'.
local function give_back(request, heard, failed, code, message)
  local had = tonumber(redis.call('HGET', request_key(request.id), 'had') or now)
  request.at_workers = request.at_workers + math.max(0, heard - had)
  redis.call('HSET', request_key(request.id), 'at_workers', request.at_workers)
  if request.cancel then
    finish_as(request, 'cancelled')
  elseif request.deadline <= now then
    finish_as(request, 'deadline')
  elseif request.attempts >= request.max_attempts then
    finish_as(request, 'error', code, message, true)
  elseif leaves_at(request) <= now then
    finish_as(request, 'deadline')
  else
    redis.call('ZREM', prefix .. 'leases', request.id)
    charge(request.rank, request.tenant, owed_for_output(request, request.tokens))
    redis.call('HSET', request_key(request.id), 'state', 'queued', 'attempts', request.attempts,
      'charged', request.charged)
    if failed then put_off(request) else join_queue(request, best_waiting()) end
    return 'queued'
  end
  return 'finished'
end
