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
-- ARGV[14]  the tenant's weight against others of its tier, integer, 1 or more
-- ARGV[15]  the longest wait that is promised, ms: one that would wait longer, or nearly, is refused; one that
--           has waited half of it may pass better tiers (see claim); one that has waited all of it is ended
-- ARGV[16]  the LoRA adapter that it is for, '' without
-- ARGV[17]  the most output that it may make, tokens
-- ARGV[18]  why it was admitted, for the UsageEvent; '' where that is not to be kept
-- Returns   {'ok', requests ahead} | {'duplicate'} | {'full', 'tier', 'tenant' or 'wait', retry after ms}
-- Example   EVALSHA sha 1 weir:{m:smollm2}: r1 <body> <usage> 1 t1 12 60000 weir:live:g1 100 10 600000 3 c1 1 60000 '' 256 ''
--@include request
local id, rank, tenant = ARGV[1], ARGV[4], ARGV[5]

if redis.call('EXISTS', request_key(id)) == 1 then
  if redis.call('HGET', request_key(id), 'call') ~= ARGV[13] then return { 'duplicate' } end
  return { 'ok', position(find(id)) }
end

-- Waits are told from means, and half of what a mean promises comes later: of the longest wait so much is given away.
local PROMISED = 0.6
local line, max_wait = prefix .. 'line:' .. rank .. ':' .. tenant, tonumber(ARGV[15])
local tier, longest = prefix .. 'tier:' .. rank, PROMISED * max_wait
local best = best_waiting()
local standing, in_tier, pace, interval = 0, 0, nil, nil
if best then
  standing, in_tier = redis.call('ZCARD', line), redis.call('ZCARD', tier)
  -- What one place in this line took lately, ms; forgotten when it says nothing of the present. And in the whole queue.
  local paces = redis.call('MGET', prefix .. 'pace:' .. rank .. ':' .. tenant, prefix .. 'interval')
  pace, interval = tonumber(paces[1] or nil), tonumber(paces[2] or nil)
end

local function full(scope, queue, size, bound)
  if size < bound then return nil end
  local retry = pace
  if not retry then
    -- As long as the oldest in line has waited so far: what this queue takes at present.
    local oldest = redis.call('ZRANGE', queue, 0, 0)[1]
    retry = oldest and now - tonumber(redis.call('HGET', request_key(oldest), 'created') or now) or 0
  end
  return { 'full', scope, math.max(1000, math.min(math.ceil(retry), 30000)) }
end
local refusal = full('tier', tier, in_tier, tonumber(ARGV[9]))
  or full('tenant', line, standing, tonumber(ARGV[10]))
if not refusal and standing > 0 and pace and pace * (standing + 1) > longest then
  refusal = { 'full', 'wait', math.max(1000, math.min(math.ceil(pace * (standing + 1) - longest), 30000)) }
end
if not refusal then
  -- A line's own pace is known only once something has left it; the whole queue's sooner, at the onset of a flood.
  local ahead = interval and ahead_of_newcomer(rank, tenant) or 0
  if ahead > 0 and interval * (ahead + 1) > longest then
    refusal = { 'full', 'wait', math.max(1000, math.min(math.ceil(interval * (ahead + 1) - longest), 30000)) }
  end
end
if refusal then return refusal end

local request = {
  id = id, rank = rank, tenant = tenant, arrival = redis.call('INCR', prefix .. 'arrivals'),
  deadline = now + tonumber(ARGV[7]), created = now, max_wait = max_wait, epoch = 0,
  tokens = 0, lives = 1, at_workers = 0, charged = 0, prompt_tokens = tonumber(ARGV[6]),
  weight = tonumber(ARGV[14]), max_output = tonumber(ARGV[17] or 0),
}
local fields = { 'body', ARGV[2], 'usage', ARGV[3], 'rank', rank,
  'tenant', tenant, 'prompt_tokens', ARGV[6], 'arrival', request.arrival, 'deadline', request.deadline,
  'channels', ARGV[8], 'created', now, 'retention', ARGV[11], 'max_attempts', ARGV[12], 'call', ARGV[13],
  'weight', ARGV[14], 'max_wait', ARGV[15], 'standing', standing, 'lifetime', ARGV[7], 'adapter', ARGV[16] or '',
  'max_output', ARGV[17] or 0, 'decision', ARGV[18] or '', 'tokens', 0 }

-- Where nothing waits, nor is put off, and a worker has said in its last claim that it has room, that worker gets the
-- request at once, the one with the most room: it is what its next claim would give it. Who does not hear it (the
-- message is told to nobody) has gone, and the request waits for another.
local HANDED_MAX = 65536 -- bytes: what is longer does not fill a slow worker's connection

local function hand_over()
  if best or (ARGV[16] or '') ~= '' or #ARGV[2] > HANDED_MAX then return false end
  local offers = prefix .. 'offers'
  local worker = redis.call('ZRANGE', offers, -1, -1)[1]
  if not worker or leaves_at(request) <= now or redis.call('EXISTS', prefix .. 'delayed') == 1 then return false end
  local known = redis.call('MGET', prefix .. 'offer:' .. worker, prefix .. 'level:' .. rank, pace_key(request))
  local lease, level, pace_told = known[1], known[2], known[3]
  local counter = lease and counter_of(rank, tenant, level or 0)
  local told = lease and string.format('%s %s %.17g\n', ARGV[7], rank, counter) .. ARGV[2]
  if not told or redis.call('PUBLISH', prefix .. 'hand:' .. worker, told) == 0 then
    redis.call('ZREM', offers, worker)
    return false
  end
  if tonumber(redis.call('ZINCRBY', offers, -1, worker)) <= 0 then redis.call('ZREM', offers, worker) end
  take_turn_at_once(rank, tenant, counter, owed_at_claim(request))
  if pace_told then redis.call('DEL', pace_key(request)) end
  redis.call('HSET', request_key(id), 'state', 'running', 'worker', worker, 'epoch', 1, 'attempts', 1,
    'claimed', now, 'had', now, 'lease', lease, 'charged', request.charged, unpack(fields))
  redis.call('ZADD', prefix .. 'leases', now + tonumber(lease), id)
  return true
end

if hand_over() then return { 'ok', 0 } end
redis.call('HSET', request_key(id), 'state', 'queued', 'epoch', 0, 'attempts', 0, 'charged', 0, unpack(fields))
join_queue(request, best)
if in_tier == 0 and (not best or tonumber(best) > tonumber(rank)) then return { 'ok', 0 } end
return { 'ok', position(request) }
