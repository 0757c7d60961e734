-- Fragment: whose turn it is within a tier, by the Virtual Token Counter (Sheng et al., "Fairness in
-- Serving Large Language Models", OSDI '24).
--
-- Each tenant of a tier has a counter, in thousandths of a token at weight 1:
--     (W_IN * uncached prompt tokens + W_OUT * output tokens) * 1000 / weight
-- The prompt is charged when the request is first claimed, the output as it is published, and what the
-- prefix cache spared is given back at the end. Lowest goes next. One that comes back from idle is
-- lifted to the least counter of those that wait, or where none waits to where the last claim stood
-- (`level`): nobody saves up turns by being away.

local W_IN, W_OUT = 1, 2
local COUNTERS_KEPT = 86400000 -- after a day without work everybody starts anew

local function cost(tokens, weight) return math.floor(tokens * 1000 / weight + 0.5) end

local function charge(rank, tenant, amount)
  if amount == 0 then return end
  local counter = redis.call('ZINCRBY', prefix .. 'served:' .. rank, amount, tenant)
  redis.call('ZADD', prefix .. 'turns:' .. rank, 'XX', counter, tenant)
end

-- The tenant has something to wait for: it takes its place among the others.
local function take_turns(rank, tenant)
  local turns, served = prefix .. 'turns:' .. rank, prefix .. 'served:' .. rank
  if redis.call('ZSCORE', turns, tenant) then return end
  local least = redis.call('ZRANGE', turns, 0, 0, 'WITHSCORES')[2]
  local floor = tonumber(least or redis.call('GET', prefix .. 'level:' .. rank) or 0)
  local counter = math.max(floor, tonumber(redis.call('ZSCORE', served, tenant) or 0))
  redis.call('ZADD', turns, counter, tenant)
  redis.call('ZADD', served, counter, tenant)
  redis.call('PEXPIRE', served, COUNTERS_KEPT)
end
