-- Undoes a reservation as if it never was: every unit goes back, slots are freed.
--
-- KEYS[1]  reservation record   weir:{t:TENANT}:reservation:ID
-- KEYS[2]  open reservations    weir:{t:TENANT}:open
-- ARGV[1]  reservation id
-- ARGV[2]  how long the released record is remembered, ms
-- returns  1 when this call released it; 0 when it was released or settled before, or is not known
--
-- An unknown id leaves a mark too: a reserve that was sent earlier and arrives later (its caller was
-- cancelled and gave up) must not take what nobody would give back.
--
-- Example: EVALSHA sha 2 weir:{t:T}:reservation:r1 weir:{t:T}:open r1 600000  ->  1

local id = ARGV[1]
local state = redis.call('HGET', KEYS[1], 'state')
if state and state ~= 'reserved' then return 0 end

if state then
  give_back(KEYS[1], id, now_ms())
  redis.call('ZREM', KEYS[2], id)
else
  redis.call('HSET', KEYS[1], 'state', 'released', 'buckets', cmsgpack.pack({}))
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return state and 1 or 0
