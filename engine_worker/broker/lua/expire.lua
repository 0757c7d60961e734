-- The sweep: ends queued requests whose deadline or longest wait has passed, takes running ones from workers
-- whose lease has lapsed, and queues those whose back-off is over. Every worker runs it about once a second, as does
-- every gateway for the models that it queued to, and the ledger's task for all; repeats are harmless.
--
-- Where no sweep came for a while, this server answered nobody, and no worker could renew: a stalled disk, a
-- restart. What lapsed in that time is left alone for a moment: its workers are most likely there, and three
-- such lapses would end a request that nobody harmed.
--
-- KEYS[1]   prefix of the model's keys
-- ARGV[1]   at most so many of each kind in one call
-- Returns   {ended by deadline, lapsed and queued again, lapsed and ended}
-- Example   EVALSHA sha 1 weir:{m:smollm2}: 100
--@include request
local SILENT, GRACE = 2000, 3000
local expired, requeued, ended = 0, 0, 0

local swept = redis.call('GET', prefix .. 'swept')
if swept and now - tonumber(swept) > SILENT then redis.call('SET', prefix .. 'silent', swept, 'PX', GRACE) end
redis.call('SET', prefix .. 'swept', now, 'PX', COUNTERS_KEPT)
local lapsed_until = redis.call('GET', prefix .. 'silent') or now

for _, id in ipairs(redis.call('ZRANGEBYSCORE', prefix .. 'deadlines', '-inf', now, 'LIMIT', 0, ARGV[1])) do
  local request = find(id)
  leave_queue(request)
  finish_as(request, 'deadline')
  expired = expired + 1
end

local lapsed = redis.call('ZRANGEBYSCORE', prefix .. 'leases', '-inf', lapsed_until, 'WITHSCORES', 'LIMIT', 0, ARGV[1])
for i = 1, #lapsed, 2 do
  local request = find(lapsed[i])
  local heard = lapsed[i + 1] - (redis.call('HGET', request_key(request.id), 'lease') or 0)
  local outcome = give_back(request, heard, true, 'worker_lost', 'The worker that was generating this answer was lost.')
  if outcome == 'queued' then requeued = requeued + 1 else ended = ended + 1 end
end

recall_due(ARGV[1])
redis.call('ZREMRANGEBYSCORE', prefix .. 'dead', '-inf', now - DEAD_KEPT)
publish_told()
return { expired, requeued, ended }
