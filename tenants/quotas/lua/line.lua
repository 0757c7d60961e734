-- A place in a key's line of requests that wait for their rate: first come, first served, over all gateways.
--
-- KEYS[1]  line     weir:{t:TENANT}:line:KEY          ids by the ms at which they came
-- KEYS[2]  alive    weir:{t:TENANT}:line:KEY:alive    ids by the ms until which they are believed to wait
-- ARGV[1]  id
-- ARGV[2]  so long it is believed to wait unless it asks again, ms
-- ARGV[3]  the most that may wait
-- returns  how many are before it; -1: the line is full
--
-- Example: EVALSHA sha 2 weir:{t:T}:line:K weir:{t:T}:line:K:alive r1 5000 200  ->  0

local id, ttl, now = ARGV[1], tonumber(ARGV[2]), now_ms()
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', text(now))) do
  redis.call('ZREM', KEYS[1], gone)
  redis.call('ZREM', KEYS[2], gone)
end
local place = redis.call('ZRANK', KEYS[1], id)
if not place then
  if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[3]) then return -1 end
  redis.call('ZADD', KEYS[1], text(now), id)
  place = redis.call('ZRANK', KEYS[1], id)
end
redis.call('ZADD', KEYS[2], text(now + ttl), id)
redis.call('PEXPIRE', KEYS[1], text(ttl))
redis.call('PEXPIRE', KEYS[2], text(ttl))
return place
