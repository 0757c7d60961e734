-- Ends a request that waits, as a failure with a reason: nobody is there to serve it. One that a worker has is left to
-- it; repeats change nothing. No dead letter: its client was told, and may ask again.
--
-- KEYS[1]   prefix of the model's keys
-- ARGV[1]   request id
-- ARGV[2]   code of the error
-- ARGV[3]   its message
-- Returns   'unknown' | 'running' | 'finished' (already, or dead) | 'refused'
-- Example   EVALSHA sha 1 weir:{m:smollm2}: r1 model_unavailable 'No worker serves ...'
--@include request
local request = find(ARGV[1])
if not request then return 'unknown' end
if request.state == 'running' then return 'running' end
if request.state ~= 'queued' then return 'finished' end
leave_queue(request)
finish_as(request, 'error', ARGV[2], ARGV[3])
publish_told()
return 'refused'
