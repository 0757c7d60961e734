-- A worker hands requests back, with their log, for another: to the front of their line, after a
-- back-off when the attempt failed.
--
-- KEYS[1]   prefix of the model's keys
-- ARGV[1]   1 when the attempt failed and counts, 0 when the worker merely drains
-- ARGV[2]   error code, for requests whose attempts are used up
-- ARGV[3]   error message, may be shown to the client
-- ARGV[4..] pairs: request id, epoch
-- Returns   per pair 'queued' | 'finished' | 'fenced'
-- Example   EVALSHA sha 1 weir:{m:smollm2}: 0 worker_lost 'the worker stopped' r1 1 r2 3
--@include request
local reply = {}
for i = 4, #ARGV, 2 do
  local request = find(ARGV[i])
  local outcome = 'fenced'
  if request and request.state == 'running' and request.epoch == tonumber(ARGV[i + 1]) then
    local failed = ARGV[1] == '1'
    if not failed then request.attempts = redis.call('HINCRBY', request_key(request.id), 'attempts', -1) end
    outcome = give_back(request, now, failed, ARGV[2], ARGV[3])
  end
  reply[#reply + 1] = outcome
end
publish_told()
return reply
