-- Where a request stands.
--
-- KEYS[1]   prefix of the model's keys
-- ARGV[1]   request id
-- Returns   {state, requests ahead (0 unless queued), attempts, tokens, tenant, last log entry ('' unless over),
--           ms in the queue so far, or until it was claimed first, or ended unclaimed, rank of its tier},
--           or {} when unknown
-- Example   EVALSHA sha 1 weir:{m:smollm2}: r1
--@include request
local request = find(ARGV[1])
if not request then return {} end
local ahead = request.state == 'queued' and position(request) or 0
local is_over = request.state == 'finished' or request.state == 'dead'
local last = is_over and redis.call('LINDEX', log_key(request.id), -1) or ''
local times = redis.call('HMGET', request_key(request.id), 'claimed', 'ended')
local left = tonumber(times[1] or times[2] or nil)
local queued = math.max(0, (left or now) - request.created)
return { request.state, ahead, request.attempts, request.tokens, request.tenant, last, queued, request.rank }
