-- Cancels a request in any state; repeats change nothing. A queued one ends here and now; a running
-- one is marked, and its worker learns of it with its next step.
--
-- KEYS[1]   prefix of the model's keys
-- ARGV[1]   request id
-- ARGV[2]   a channel: cancel only if it is the one that attached last; '' cancels whoever listens
-- Returns   'unknown' | 'finished' (already) | 'watched' (left alone, see ARGV[2])
--           | 'cancelled' (was queued) | 'running' (marked)
-- Example   EVALSHA sha 1 weir:{m:smollm2}: r1 ''
--@include request
local request = find(ARGV[1])
if not request then return 'unknown' end
if request.state == 'finished' or request.state == 'dead' then return 'finished' end
if ARGV[2] ~= '' and string.match(request.channels, '[^\n]+') ~= ARGV[2] then return 'watched' end
if request.state == 'running' then
  redis.call('HSET', request_key(request.id), 'cancel', 1)
  return 'running'
end
leave_queue(request)
finish_as(request, 'cancelled')
publish_told()
return 'cancelled'
