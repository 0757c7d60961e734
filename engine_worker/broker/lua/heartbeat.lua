-- A worker says that it is alive, and keeps its model's card from lapsing.
--
-- KEYS[1]   prefix of the model's keys
-- ARGV[1]   worker id
-- ARGV[2]   WorkerStatus, MessagePack
-- ARGV[3]   how long it counts, ms
-- ARGV[4]   how long the card outlives the last heartbeat, s
-- Returns   1, or 0 when the model's card is gone and the worker must register again
-- Example   EVALSHA sha 1 weir:{m:smollm2}: w1 <status> 15000 86400
local prefix = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('SET', prefix .. 'worker:' .. ARGV[1], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', prefix .. 'workers', now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', prefix .. 'workers', '-inf', now - tonumber(ARGV[3]))
redis.call('PEXPIRE', prefix .. 'workers', 60000)
return redis.call('EXPIRE', prefix .. 'card', ARGV[4])
