-- Fragment: whose turn it is within a tier, by the Virtual Token Counter (Sheng et al., "Fairness in
-- Serving Large Language Models", OSDI '24).
--
-- Each tenant of a tier has a counter, in thousandths of a token at weight 1:
--     (W_IN * uncached prompt tokens + W_OUT * output tokens) * 1000 / weight
-- The prompt is charged when the request is first claimed, and what the prefix cache spared is given
-- back at the end. Output is charged ahead (the paper's VTC with length prediction): at each claim as
-- much as the tenant's requests have made lately, then beyond that as it is published; what was not
-- made is given back when the request ends or leaves its worker. Else a tenant of long answers takes
-- many slots before its counter shows it. `charged` of a request says how much of its output the
-- counter holds, and equals `tokens` unless it runs: so all that is charged comes to what was served.
-- Lowest goes next. One that comes back from idle is lifted to the least counter of those that wait, or
-- where none waits to where the last claim stood (`level`): nobody saves up turns by being away.

local W_IN, W_OUT = 1, 2
local COUNTERS_KEPT = 86400000 -- after a day without work everybody starts anew

-- For a day at least, and an hour more where it would end before: so most calls have nothing to write.
local function keep_counters(key)
  if redis.call('PTTL', key) < COUNTERS_KEPT then redis.call('PEXPIRE', key, COUNTERS_KEPT + 3600000) end
end

local function cost(tokens, weight) return math.floor(tokens * 1000 / weight + 0.5) end

local function charge(rank, tenant, amount)
  if amount == 0 then return end
  local counter = redis.call('ZINCRBY', prefix .. 'served:' .. rank, amount, tenant)
  redis.call('ZADD', prefix .. 'turns:' .. rank, 'XX', counter, tenant)
end

-- What is to be charged to bring the part of a request's output that is charged to so many tokens, up or down. The
-- caller charges it, and writes `charged`.
local function owed_for_output(request, tokens)
  local owed, paid = cost(W_OUT * tokens, request.weight), cost(W_OUT * request.charged, request.weight)
  request.charged = tokens
  return owed - paid
end

local NEWEST_LENGTH = 8 -- the latest answer's part in the mean is one of so many

-- How long an answer is to be expected: as the tenant's were lately, or the tier's; nothing where neither is known.
local function expected_output(request)
  local known = redis.call('HMGET', prefix .. 'lengths:' .. request.rank, request.tenant, '')
  local mean = tonumber(known[1] or known[2] or nil)
  return mean and math.min(math.ceil(mean / 1000), request.max_output) or 0
end

-- What a tenant is charged when its request is claimed.
local function owed_at_claim(request)
  local owed = owed_for_output(request, math.max(request.tokens, expected_output(request)))
  if request.epoch == 0 then owed = owed + cost(W_IN * request.prompt_tokens, request.weight) end
  return owed
end

local function learn_length(request)
  local key = prefix .. 'lengths:' .. request.rank
  local latest, known = 1000 * request.tokens, redis.call('HMGET', key, request.tenant, '')
  local function with_latest(mean) return mean and mean + math.floor((latest - mean) / NEWEST_LENGTH) or latest end
  redis.call('HSET', key, request.tenant, with_latest(known[1]), '', with_latest(known[2]))
  keep_counters(key)
end

-- The counter with which a tenant comes back from idle, and what it was before, or nil. `least` is that of those that
-- wait, or nil where none waits.
local function counter_of(rank, tenant, least)
  local floor = tonumber(least or redis.call('GET', prefix .. 'level:' .. rank) or 0)
  local before = tonumber(redis.call('ZSCORE', prefix .. 'served:' .. rank, tenant) or nil)
  return math.max(floor, before or 0), before
end

-- As a turn that nobody else waits for.
local function take_turn_at_once(rank, tenant, counter, owed)
  local served = prefix .. 'served:' .. rank
  redis.call('SET', prefix .. 'level:' .. rank, counter, 'PX', COUNTERS_KEPT)
  redis.call('ZADD', served, counter + owed, tenant)
  keep_counters(served)
end

-- The tenant has something to wait for: it takes its place among the others.
local function take_turns(rank, tenant)
  local turns, served = prefix .. 'turns:' .. rank, prefix .. 'served:' .. rank
  if redis.call('ZSCORE', turns, tenant) then return end
  local counter, before = counter_of(rank, tenant, redis.call('ZRANGE', turns, 0, 0, 'WITHSCORES')[2])
  redis.call('ZADD', turns, counter, tenant)
  if counter ~= before then redis.call('ZADD', served, counter, tenant) end
  keep_counters(served)
end
