-- Charges what a request really used: gives back the unused part, takes what went beyond, frees its slots.
--
-- KEYS[1]  reservation record   weir:{t:TENANT}:reservation:ID
-- ARGV[1]  reservation id
-- ARGV[2]  prompt tokens
-- ARGV[3]  output tokens
-- ARGV[4]  how long the settled record is remembered, ms
-- returns  1 when this call settled it; 0 when it was settled before, or the id is not known (any more)
--
-- Settled once, by whoever comes first: the gateway at the end of the stream, the ledger later. After a
-- release it still charges in full: usage proves that the request did run after all.
--
-- Example: EVALSHA sha 1 weir:{t:T}:reservation:r1 r1 20 35 600000  ->  1

local id, used = ARGV[1], tonumber(ARGV[2]) + tonumber(ARGV[3])
local record = redis.call('HMGET', KEYS[1], 'state', 'buckets')
if not record[1] or record[1] == 'settled' then return 0 end

local now = now_ms()
local released = record[1] == 'released'
for _, bucket in ipairs(buckets_of(record[2])) do
  if bucket.period == 0 then
    free_slot(bucket, id)
  else
    local taken = released and 0 or bucket.taken
    local exact = bucket.metric == 'tokens' and used * 1000 or 1000
    adjust(bucket, taken - exact, now)
  end
end
redis.call('HSET', KEYS[1], 'state', 'settled')
redis.call('HDEL', KEYS[1], 'buckets')
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
