-- Reads every bucket; changes nothing.
--
-- KEYS[1]   what is known   weir:{t:TENANT}:warm
-- KEYS[2..] buckets         as in reserve.lua
-- ARGV[1]   1: what Redis does not know is to be recalled from the ledger first; 0: it is taken for full
-- ARGV[2..] per bucket: metric, amount, period, burst, hard, known as (see bucket.lua)
-- returns   per bucket: remaining in whole units, ms until full;
--           or {'cold', i, ...}: the buckets with these numbers must be restored first
--
-- Example: EVALSHA sha 2 weir:{t:T}:warm weir:{t:T}:quota:tenant:T:requests:60 0 requests 60 60 60 1 tenant:T  ->  {60, 0}

local now = now_ms()
local buckets = buckets_from(2, 2)
if ARGV[1] == '1' then
  local cold = cold_of(buckets, KEYS[1])
  if cold then return cold end
end
local reply = {}
for _, bucket in ipairs(buckets) do
  local state = state_of(bucket, now)
  reply[#reply + 1] = state[1]
  reply[#reply + 1] = state[2]
end
return reply
