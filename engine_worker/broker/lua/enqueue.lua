-- Puts a request in its place in the queue, or refuses it; all or nothing, O(log n).
--
-- KEYS[1]   prefix of the model's keys
-- ARGV[1]   request id
-- ARGV[2]   GenerateRequest, MessagePack
-- ARGV[3]   the UsageEvent's fields known now, MessagePack map
-- ARGV[4]   tier rank, integer, 0 goes first
-- ARGV[5]   tenant's public id
-- ARGV[6]   prompt length, tokens
-- ARGV[7]   time until the deadline, ms
-- ARGV[8]   live channel
-- ARGV[9]   bound of the tier's queue, requests
-- ARGV[10]  bound of the tenant's part of it, requests
-- ARGV[11]  how long log and id are kept after the end, ms
-- ARGV[12]  attempts before it fails for good
-- ARGV[13]  the call's own id: a repeat of the same call is not a duplicate
-- Returns   {'ok', requests ahead} | {'duplicate'} | {'full', 'tier' or 'tenant', retry after ms}
-- Example   EVALSHA sha 1 weir:{m:smollm2}: r1 <body> <usage> 1 t1 12 60000 weir:live:g1 100 10 600000 3 c1
--@include request
local id, rank, tenant = ARGV[1], ARGV[4], ARGV[5]

if redis.call('EXISTS', request_key(id)) == 1 then
  if redis.call('HGET', request_key(id), 'call') ~= ARGV[13] then return { 'duplicate' } end
  return { 'ok', position(find(id)) }
end

local function full(scope, queue, bound)
  if redis.call('ZCARD', queue) < tonumber(bound) then return nil end
  -- As long as the oldest in line has waited so far: what this queue takes at present.
  local oldest = redis.call('ZRANGE', queue, 0, 0)[1]
  local waited = oldest and now - tonumber(redis.call('HGET', request_key(oldest), 'created') or now) or 0
  return { 'full', scope, math.max(1000, math.min(waited, 30000)) }
end
local refusal = full('tier', prefix .. 'tier:' .. rank, ARGV[9])
  or full('tenant', prefix .. 'line:' .. rank .. ':' .. tenant, ARGV[10])
if refusal then return refusal end

local request = {
  id = id, rank = rank, tenant = tenant, arrival = redis.call('INCR', prefix .. 'arrivals'),
  deadline = now + tonumber(ARGV[7]),
}
redis.call('HSET', request_key(id), 'state', 'queued', 'body', ARGV[2], 'usage', ARGV[3], 'rank', rank,
  'tenant', tenant, 'prompt_tokens', ARGV[6], 'arrival', request.arrival, 'deadline', request.deadline,
  'channels', ARGV[8], 'created', now, 'retention', ARGV[11], 'max_attempts', ARGV[12], 'call', ARGV[13],
  'epoch', 0, 'attempts', 0, 'tokens', 0)
join_queue(request)
return { 'ok', position(request) }
