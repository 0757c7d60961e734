-- An operator lets a dead request go: its prompt is forgotten now, the rest after the usual retention.
--
-- KEYS[1]   prefix of the model's keys
-- ARGV[1]   request id
-- Returns   'dropped' | 'unknown' | 'alive' (it is not dead)
-- Example   EVALSHA sha 1 weir:{m:smollm2}: r1
--@include request
local request = find(ARGV[1])
if not request then return 'unknown' end
if request.state ~= 'dead' then return 'alive' end
redis.call('ZREM', prefix .. 'dead', request.id)
redis.call('HSET', request_key(request.id), 'state', 'finished')
redis.call('HDEL', request_key(request.id), 'body', 'usage', 'decision')
redis.call('PEXPIRE', request_key(request.id), request.retention)
redis.call('PEXPIRE', log_key(request.id), request.retention)
return 'dropped'
