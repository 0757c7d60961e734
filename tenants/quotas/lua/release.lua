-- Undoes a reservation as if it never was: every unit goes back, slots are freed.
--
-- KEYS[1]  reservation record   weir:{t:TENANT}:reservation:ID
-- ARGV[1]  reservation id
-- ARGV[2]  how long the released record is remembered, ms
-- returns  1 when this call released it; 0 when it was released or settled before, or is not known
--
-- An unknown id leaves a mark too: a reserve that was sent earlier and arrives later (its caller was
-- cancelled and gave up) must not take what nobody would give back.
--
-- Example: EVALSHA sha 1 weir:{t:T}:reservation:r1 r1 600000  ->  1

local id = ARGV[1]
local record = redis.call('HMGET', KEYS[1], 'state', 'buckets')
if record[1] and record[1] ~= 'reserved' then return 0 end

local now = now_ms()
if record[2] then
  for _, bucket in ipairs(buckets_of(record[2])) do
    if bucket.period == 0 then
      free_slot(bucket, id)
    else
      adjust(bucket, bucket.taken, now)
    end
  end
end
redis.call('HSET', KEYS[1], 'state', 'released')
if not record[2] then redis.call('HSET', KEYS[1], 'buckets', cmsgpack.pack({})) end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return record[1] and 1 or 0
