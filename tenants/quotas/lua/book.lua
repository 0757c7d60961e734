-- Counts a row of the ledger whose reservation Redis has forgotten: once, and in those budgets that do not know it.
--
-- KEYS[1]   reservation record   weir:{t:TENANT}:reservation:ID
-- KEYS[2]   what came late       weir:{t:TENANT}:late
-- KEYS[3..] budgets              as in reserve.lua
-- ARGV[1]   the row's number in the ledger
-- ARGV[2]   how long the record is remembered, ms
-- ARGV[3]   so long a recall of the ledger takes at most, ms
-- ARGV[4..] per budget: the units that the row comes to
-- returns   1; 0 when the reservation is there after all: it is to be settled
--
-- A budget that was put back from the ledger says up to which row (restore.lua): what is in it is not counted again.
-- One that is not there is put back by the next who asks. That one may have read the ledger before this row was
-- written: it finds the row here.
--
-- Example: EVALSHA sha 3 weir:{t:T}:reservation:r1 weir:{t:T}:late weir:{t:T}:budget:tenant:T:tokens:7:2026-11
--          4712 86400000 60000 35  ->  1

if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('HSET', KEYS[1], 'state', 'settled')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local row = tonumber(ARGV[1])
for i = 3, #KEYS do
  local units = tonumber(ARGV[i + 1])
  if redis.call('EXISTS', KEYS[i]) == 0 then
    redis.call('ZADD', KEYS[2], ARGV[1], cmsgpack.pack({row, KEYS[i], units}))
    redis.call('PEXPIRE', KEYS[2], ARGV[3])
  elseif row > tonumber(redis.call('HGET', KEYS[i], 'through') or 0) then
    count_in_budget({key = KEYS[i]}, units, 0)
  end
end
return 1
