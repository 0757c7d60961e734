-- Charges what a request really used: gives back the unused part, takes what went beyond, frees its slots.
--
-- KEYS[1]  reservation record   weir:{t:TENANT}:reservation:ID
-- KEYS[2]  open reservations    weir:{t:TENANT}:open
-- ARGV[1]  reservation id
-- ARGV[2]  prompt tokens
-- ARGV[3]  output tokens
-- ARGV[4]  cost, micro-USD
-- ARGV[5]  how long the settled record is remembered, ms
-- returns  1 when this call settled it; 0 when it was settled before; -1 when the id is not known (any more)
--
-- Settled once, by whoever comes first: the gateway at the end of the stream, the ledger later. After a
-- release it still charges in full: usage proves that the request did run after all.
--
-- Example: EVALSHA sha 2 weir:{t:T}:reservation:r1 weir:{t:T}:open r1 20 35 0 600000  ->  1

local id = ARGV[1]
local used = {
  requests = 1,
  input_tokens = tonumber(ARGV[2]),
  output_tokens = tonumber(ARGV[3]),
  tokens = tonumber(ARGV[2]) + tonumber(ARGV[3]),
  cost = tonumber(ARGV[4]),
}
local record = redis.call('HMGET', KEYS[1], 'state', 'buckets')
if not record[1] then return -1 end
if record[1] == 'settled' then return 0 end

local now = now_ms()
local released = record[1] == 'released'
for _, bucket in ipairs(buckets_of(record[2])) do
  local taken = released and 0 or bucket.taken
  if bucket.period == SLOTS then
    free_slot(bucket, id)
  elseif bucket.period == BUDGET then
    count_in_budget(bucket, used[bucket.metric], -taken)
  else
    adjust(bucket, taken - used[bucket.metric] * 1000, now)
  end
end
redis.call('HSET', KEYS[1], 'state', 'settled')
redis.call('HDEL', KEYS[1], 'buckets')
redis.call('PEXPIRE', KEYS[1], ARGV[5])
redis.call('ZREM', KEYS[2], id)
return 1
