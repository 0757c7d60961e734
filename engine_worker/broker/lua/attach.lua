-- From now on the request's live tokens also go to one more channel.
--
-- KEYS[1]   prefix of the model's keys
-- ARGV[1]   request id
-- ARGV[2]   channel
-- Returns   1, or 0 when the request is unknown
-- Example   EVALSHA sha 1 weir:{m:smollm2}: r1 weir:live:g2
local key = KEYS[1] .. 'req:' .. ARGV[1]
local channels = redis.call('HGET', key, 'channels')
if not channels then return 0 end

-- Newest first, without repeats, at most eight: each costs a message per step, and a client that
-- reconnects often must not pile them up.
local kept, n = { ARGV[2] }, 1
for channel in string.gmatch(channels, '[^\n]+') do
  if channel ~= ARGV[2] and n < 8 then
    n = n + 1
    kept[n] = channel
  end
end
redis.call('HSET', key, 'channels', table.concat(kept, '\n'))
return 1
