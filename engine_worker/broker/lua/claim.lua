-- Gives a worker the next requests, each under a lease and a new epoch. Requests whose deadline has
-- passed are ended on the way and not handed out.
--
-- KEYS[1]   prefix of the model's keys
-- ARGV[1]   worker id
-- ARGV[2]   how many the worker can start now
-- ARGV[3]   lease, ms
-- Returns   {server time ms, {body, epoch, attempt, deadline server ms, {log entry, ...}}, ...}
-- Example   EVALSHA sha 1 weir:{m:smollm2}: w1 4 10000
--@include request
local worker, count, lease = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local reply = { now }
local ended = 0

-- The bound keeps one call short when a long backlog has outlived its deadlines; the sweep does the rest.
while #reply <= count and ended < 64 do
  local rank = redis.call('ZRANGE', prefix .. 'tiers', 0, 0)[1]
  if not rank then break end
  local tenant = redis.call('ZRANGE', prefix .. 'turns:' .. rank, 0, 0)[1]
  local id = redis.call('ZRANGE', prefix .. 'line:' .. rank .. ':' .. tenant, 0, 0)[1]
  local request = find(id)
  leave_queue(request)
  if request.deadline <= now then
    finish_as(request, 'deadline')
    ended = ended + 1
  else
    local key = request_key(id)
    redis.call('HSET', key, 'state', 'running', 'worker', worker, 'epoch', request.epoch + 1,
      'attempts', request.attempts + 1)
    redis.call('HSETNX', key, 'claimed', now)
    redis.call('ZADD', prefix .. 'leases', now + lease, id)
    local log = request.tokens > 0 and redis.call('LRANGE', log_key(id), 0, -1) or {}
    reply[#reply + 1] = { redis.call('HGET', key, 'body'), request.epoch + 1, request.attempts + 1, request.deadline, log }
  end
end

publish_told()
return reply
