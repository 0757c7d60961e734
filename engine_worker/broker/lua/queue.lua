-- Fragment: the queue. A request waits in its tenant's line, and counts in its tier; or it is put off
-- (`delayed`) until its back-off is over, and stands in no line.

-- Until when it may stand in the queue, ms: until its deadline, and before its first token no longer than was
-- promised, over all attempts. Time at a worker that was there is not waiting (see give_back). In a later life
-- nobody was promised anything.
local function leaves_at(request)
  if request.tokens > 0 or request.lives > 1 then return request.deadline end
  return math.min(request.deadline, request.created + request.max_wait + request.at_workers)
end

-- For workers that wait. Bounded: more hints than idle workers only cost empty claims. Not cut at each one more.
local function hint(list, what, kept)
  if redis.call('LPUSH', prefix .. list, what) > 32 then redis.call('LTRIM', prefix .. list, 0, 15) end
  redis.call('PEXPIRE', prefix .. list, kept)
end

-- The best rank that has a backlog, or nil.
local function best_waiting() return redis.call('ZRANGE', prefix .. 'tiers', 0, 0)[1] end

-- A request that comes back keeps its arrival number, and so stands before all that came after it.
-- `best` is the best rank that had a backlog before, or nil.
local function join_queue(request, best)
  if not best or tonumber(request.rank) < tonumber(best) then
    -- For workers that are full of what is worse: the only one of its class, or of a better one, that waits.
    hint('better', request.rank, 5000)
  end
  redis.call('ZADD', prefix .. 'tiers', request.rank, request.rank)
  redis.call('ZADD', prefix .. 'tier:' .. request.rank, request.arrival, request.id)
  redis.call('ZADD', prefix .. 'line:' .. request.rank .. ':' .. request.tenant, request.arrival, request.id)
  redis.call('ZADD', prefix .. 'deadlines', leaves_at(request), request.id)
  take_turns(request.rank, request.tenant)
  hint('wake', 1, 60000)
end

local function leave_line(request)
  local tier = prefix .. 'tier:' .. request.rank
  local line = prefix .. 'line:' .. request.rank .. ':' .. request.tenant
  redis.call('ZREM', tier, request.id)
  redis.call('ZREM', line, request.id)
  local is_last = redis.call('EXISTS', tier) == 0
  if is_last then redis.call('ZREM', prefix .. 'tiers', request.rank) end
  if is_last or redis.call('EXISTS', line) == 0 then
    redis.call('ZREM', prefix .. 'turns:' .. request.rank, request.tenant)
  end
  redis.call('ZREM', prefix .. 'deadlines', request.id)
end

local function leave_queue(request)
  if redis.call('ZREM', prefix .. 'delayed', request.id) == 0 then
    leave_line(request)
  else
    redis.call('ZREM', prefix .. 'deadlines', request.id)
  end
end

local BACKOFF_MIN, BACKOFF_MAX = 200, 30000

-- Back to the queue, but not at once: whatever took the last worker may still be there. Doubles with
-- each attempt; between half and all of it, so that what fell together does not come back together.
local function put_off(request)
  local wait = math.min(BACKOFF_MIN * 2 ^ math.max(0, request.attempts - 1), BACKOFF_MAX)
  local spread = tonumber(string.sub(redis.sha1hex(request.id .. ':' .. request.epoch), 1, 6), 16) / 0xffffff
  redis.call('ZADD', prefix .. 'delayed', now + math.floor(wait * (0.5 + 0.5 * spread)), request.id)
  redis.call('ZADD', prefix .. 'deadlines', leaves_at(request), request.id)
end

local function recall_due(limit)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'delayed', '-inf', now, 'LIMIT', 0, limit)) do
    redis.call('ZREM', prefix .. 'delayed', id)
    join_queue(find(id), best_waiting())
  end
end

-- What one place of a line took, told when its request is first claimed; kept while it says something of the present.
local PACE_KEPT = 30000

local function pace_key(request) return prefix .. 'pace:' .. request.rank .. ':' .. request.tenant end

local function note_pace(request, standing)
  redis.call('SET', pace_key(request), (now - request.created) / (standing + 1), 'PX', PACE_KEPT)
end

-- About how many requests go before this queued one: all of better tiers, those before it in its own
-- line, and of the other lines of its tier as many turns as it needs itself.
local function ahead_of(rank, tenant, before)
  local line = prefix .. 'line:' .. rank .. ':' .. tenant
  local others = redis.call('ZCARD', prefix .. 'tier:' .. rank) - redis.call('ZCARD', line)
  local turns = prefix .. 'turns:' .. rank
  local other_tenants = redis.call('ZCARD', turns) - (redis.call('ZSCORE', turns, tenant) and 1 or 0)
  local ahead = before + math.min(others, other_tenants * (before + 1))
  for _, better in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'tiers', '-inf', '(' .. rank)) do
    ahead = ahead + redis.call('ZCARD', prefix .. 'tier:' .. better)
  end
  return ahead
end

local function position(request)
  local line = prefix .. 'line:' .. request.rank .. ':' .. request.tenant
  return ahead_of(request.rank, request.tenant, redis.call('ZRANK', line, request.id) or 0)
end

local function ahead_of_newcomer(rank, tenant)
  return ahead_of(rank, tenant, redis.call('ZCARD', prefix .. 'line:' .. rank .. ':' .. tenant))
end
