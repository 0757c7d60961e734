-- Reads every bucket; changes nothing.
--
-- KEYS     buckets   as in reserve.lua
-- ARGV     per bucket: metric, amount, period, burst, hard, owner (see bucket.lua)
-- returns  per bucket: remaining in whole units, ms until full
--
-- Example: EVALSHA sha 1 weir:{t:T}:quota:tenant:T:requests:60 requests 60 60 60 1 tenant:T  ->  {60, 0}

local now = now_ms()
local reply = {}
for _, bucket in ipairs(buckets_from(1, 1)) do
  local state = state_of(bucket, now)
  reply[#reply + 1] = state[1]
  reply[#reply + 1] = state[2]
end
return reply
