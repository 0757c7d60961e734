-- Reads every bucket; changes nothing.
--
-- KEYS     buckets   weir:{t:TENANT}:quota:SCOPE:OWNER:METRIC:PERIOD_S
-- ARGV     per bucket: metric, amount, period in s (0: concurrency), burst
-- returns  per bucket: remaining in whole units, ms until full
--
-- Example: EVALSHA sha 1 weir:{t:T}:quota:tenant:T:requests:60 requests 60 60 60  ->  {60, 0}

local now = now_ms()
local reply = {}
for _, bucket in ipairs(buckets_from(1, 1)) do
  local state = state_of(bucket, now)
  reply[#reply + 1] = state[1]
  reply[#reply + 1] = state[2]
end
return reply
