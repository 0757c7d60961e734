-- Puts buckets back as the ledger knows them, where Redis does not: after it was flushed, or for a budget that
-- is new. What is known already stays.
--
-- KEYS[1]   what is known   weir:{t:TENANT}:warm
-- KEYS[2]   what came late  weir:{t:TENANT}:late
-- KEYS[3..] buckets         as in reserve.lua
-- ARGV[1]   the ledger's last row of which the amounts tell
-- ARGV[2..] per bucket: metric, amount, period, burst, hard, known as (see bucket.lua)
-- then      per bucket: what it was found to be: a rate's level in milli-units, a budget's spent units
-- returns   how many were put back
--
-- Example: EVALSHA sha 3 weir:{t:T}:warm weir:{t:T}:late weir:{t:T}:quota:tenant:T:tokens:60
--          4711 tokens 6000 60 6000 1 tenant:T 1200000  ->  1

local now = now_ms()
local buckets = buckets_from(3, 2)

-- Of rows that were written after the ledger was read, and booked before this call.
local function came_late(bucket)
  local units = 0
  for _, packed in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[1], '+inf')) do
    local row = cmsgpack.unpack(packed)
    if row[2] == bucket.key then units = units + row[3] end
  end
  return units
end

local restored = 0
for i, bucket in ipairs(buckets) do
  if redis.call('SISMEMBER', KEYS[1], bucket.known_as) == 0 and redis.call('EXISTS', bucket.key) == 0 then
    local found = tonumber(ARGV[1 + #buckets * 6 + i])
    if bucket.period == BUDGET then
      redis.call('HSET', bucket.key, 'spent', text(found + came_late(bucket)), 'reserved', '0', 'through', ARGV[1])
      redis.call('PEXPIREAT', bucket.key, text(bucket.burst + BUDGET_KEPT_MS))
    else
      store_level(bucket, math.min(capacity(bucket), found), 0, now)
    end
    restored = restored + 1
  end
end
-- Afterwards: an owner has several rates.
for _, bucket in ipairs(buckets) do redis.call('SADD', KEYS[1], bucket.known_as) end
return restored
