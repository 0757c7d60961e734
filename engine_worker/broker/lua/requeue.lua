-- An operator gives a dead request another life: queued again, with its log, as many attempts and as
-- much time as at first. A client that comes back to it reads on where its answer broke off.
--
-- KEYS[1]   prefix of the model's keys
-- ARGV[1]   request id
-- Returns   'queued' | 'unknown' | 'alive' (it is not dead)
-- Example   EVALSHA sha 1 weir:{m:smollm2}: r1
--@include request
local request = find(ARGV[1])
if not request then return 'unknown' end
if request.state ~= 'dead' then return 'alive' end
local key = request_key(request.id)
redis.call('PERSIST', key)
redis.call('PERSIST', log_key(request.id))
redis.call('RPOP', log_key(request.id)) -- the end that it came to
redis.call('ZREM', prefix .. 'dead', request.id)
request.deadline = now + tonumber(redis.call('HGET', key, 'lifetime') or 300000)
request.lives = request.lives + 1
redis.call('HSET', key, 'state', 'queued', 'attempts', 0, 'deadline', request.deadline,
  'lives', request.lives, 'billed', request.tokens)
join_queue(request, best_waiting())
return 'queued'
