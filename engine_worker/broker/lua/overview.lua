-- What waits and what runs, for people. Costs a few commands per tenant that waits, so not for every second
-- of every page.
--
-- KEYS[1]   prefix of the model's keys
-- ARGV[1]   at most so many tenants of each tier, those whose turn comes first
-- Returns   {running, in back-off, dead,
--            {{rank, waiting, age of the oldest ms, {{tenant, waiting, age of its oldest ms, counter}, ...}}, ...}}
-- Example   EVALSHA sha 1 weir:{m:smollm2}: 100
--@include request
local function age(queue)
  local id = redis.call('ZRANGE', queue, 0, 0)[1]
  return id and now - tonumber(redis.call('HGET', request_key(id), 'created') or now) or 0
end
local tiers = {}
for _, rank in ipairs(redis.call('ZRANGE', prefix .. 'tiers', 0, -1)) do
  local tier, tenants = prefix .. 'tier:' .. rank, {}
  local turns = redis.call('ZRANGE', prefix .. 'turns:' .. rank, 0, tonumber(ARGV[1]) - 1, 'WITHSCORES')
  for i = 1, #turns, 2 do
    local line = prefix .. 'line:' .. rank .. ':' .. turns[i]
    tenants[#tenants + 1] = { turns[i], redis.call('ZCARD', line), age(line), turns[i + 1] }
  end
  tiers[#tiers + 1] = { tonumber(rank), redis.call('ZCARD', tier), age(tier), tenants }
end
return {
  redis.call('ZCARD', prefix .. 'leases'), redis.call('ZCARD', prefix .. 'delayed'),
  redis.call('ZCARD', prefix .. 'dead'), tiers,
}
