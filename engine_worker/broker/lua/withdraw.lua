-- A worker goes for good: somebody unloaded its model. With the last one the model is gone at once, and marked,
-- so that gateways tell it from one whose workers only start again.
--
-- KEYS[1]   prefix of the model's keys
-- ARGV[1]   worker id
-- ARGV[2]   how long a heartbeat counts, ms
-- Returns   1 when no worker is left, else 0
-- Example   EVALSHA sha 1 weir:{m:smollm2}: w1 15000
local prefix = KEYS[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('DEL', prefix .. 'worker:' .. ARGV[1])
redis.call('ZREM', prefix .. 'workers', ARGV[1])
redis.call('ZREM', prefix .. 'offers', ARGV[1])
redis.call('ZREMRANGEBYSCORE', prefix .. 'workers', '-inf', now - tonumber(ARGV[2]))
if redis.call('EXISTS', prefix .. 'workers') == 1 then return 0 end
redis.call('DEL', prefix .. 'card')
redis.call('SET', prefix .. 'withdrawn', 1)
return 1
