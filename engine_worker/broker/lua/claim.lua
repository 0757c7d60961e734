-- Gives a worker the next requests, each under a lease and a new epoch. Requests whose deadline has
-- passed, or whose longest wait, are ended on the way and not handed out.
--
-- Better tiers go first. But a request of a lower one that has waited half of the longest wait that it
-- was promised passes them, oldest first, and keeps the better class at its worker, so that it isn't
-- put aside there either. Only every fourth turn, while a better tier waits: those bounded waits must
-- not become the better tier's. Within a tier it is the turn of the tenant with the least counter.
--
-- KEYS[1]   prefix of the model's keys
-- ARGV[1]   worker id
-- ARGV[2]   how many the worker can start now
-- ARGV[3]   lease, ms
-- ARGV[4]   how many more it would start by putting aside what is of the class in ARGV[5] or below
-- ARGV[5]   the best class that it would put aside, integer: only better ones come beyond ARGV[2]
-- ARGV[6]   for so long, ms, requests may be handed to the worker without being asked for (see enqueue), as many as
--           are left of ARGV[2]; 0: none
-- ARGV[7..] LoRA adapters that the worker has: requests for others are left to whoever has those
-- Returns   {server time ms, {body, epoch, attempt, deadline server ms, {log entry, ...}, class, counter,
--            ms in the queue before its first claim}, ...}
-- Example   EVALSHA sha 1 weir:{m:smollm2}: w1 4 10000 0 0 1500
--@include request
local worker, count, lease = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local extra, put_aside = tonumber(ARGV[4] or 0), tonumber(ARGV[5] or 0)
local PASS_EVERY = 4
local NEWEST = 0.1 -- share of the latest interval in the mean
local DEPTH = 16 -- so many of a line, and so many lines of a tier, are looked at for one that can be served here
-- The next flood is to find it, and the first claims of a backlog mend it where it is too short. Where it is too long
-- (a worker was away) nobody may wait, so that there is no backlog to mend it: then it has to be forgotten.
local INTERVAL_KEPT = 300000
local reply = { now }
local ended = 0
local any_waits -- as the last look at the tiers found, where nothing was changed since
local adapters = { [''] = true }
for i = 7, #ARGV do adapters[ARGV[i]] = true end

local function is_servable(id) return adapters[redis.call('HGET', request_key(id), 'adapter') or ''] end

-- Whose turn it is in a tier: the first servable request of the first line that has one, and that line's counter.
local function turn_of(rank)
  local turns = redis.call('ZRANGE', prefix .. 'turns:' .. rank, 0, 0, 'WITHSCORES')
  local last = 0
  while #turns > 0 do
    for i = 1, #turns, 2 do
      local line = prefix .. 'line:' .. rank .. ':' .. turns[i]
      local first = redis.call('ZRANGE', line, 0, 0)[1]
      if is_servable(first) then return first, turns[i + 1] end
      for _, id in ipairs(redis.call('ZRANGE', line, 1, DEPTH - 1)) do
        if is_servable(id) then return id, turns[i + 1] end
      end
    end
    if last > 0 then return nil end
    last = DEPTH - 1
    turns = redis.call('ZRANGE', prefix .. 'turns:' .. rank, 1, last, 'WITHSCORES')
  end
end

-- Of the lower tiers' oldest requests the one that has waited longest beyond its due, or nil.
local function overdue(ranks)
  local found, most = nil, 1
  for i = 2, #ranks do
    local id = redis.call('ZRANGE', prefix .. 'tier:' .. ranks[i], 0, 0)[1]
    local f = redis.call('HMGET', request_key(id), 'created', 'max_wait')
    local waited = 2 * (now - tonumber(f[1])) / tonumber(f[2] or 3600000)
    if waited >= most and is_servable(id) then found, most = id, waited end
  end
  return found
end

recall_due(100)
-- The bound keeps one call short when a long backlog has outlived its deadlines; the sweep does the rest.
while ended < 64 do
  local ranks = redis.call('ZRANGE', prefix .. 'tiers', 0, -1)
  any_waits = #ranks > 0
  local class, head, level
  for i, rank in ipairs(ranks) do
    head, level = turn_of(rank)
    if head then
      class, ranks[1] = rank, rank
      for _ = 2, i do table.remove(ranks, 2) end
      break
    end
  end
  if not class then break end
  local bound = tonumber(class) < put_aside and count + extra or count
  if #reply > bound then break end

  local id = overdue(ranks)
  if id then
    if redis.call('INCR', prefix .. 'passes') % PASS_EVERY ~= 0 then id = nil end
    redis.call('PEXPIRE', prefix .. 'passes', COUNTERS_KEPT)
  end
  if not id then
    redis.call('SET', prefix .. 'level:' .. class, level, 'PX', COUNTERS_KEPT)
    id = head
  end

  local request = find(id)
  local counter = id == head and level or redis.call('ZSCORE', prefix .. 'turns:' .. request.rank, request.tenant)
  leave_line(request)
  any_waits = nil
  if leaves_at(request) <= now then
    finish_as(request, 'deadline')
    ended = ended + 1
  else
    local key = request_key(id)
    local more = redis.call('HMGET', key, 'standing', 'body')
    charge(request.rank, request.tenant, owed_at_claim(request))
    if request.epoch == 0 then note_pace(request, tonumber(more[1] or 0)) end
    local claimed = request.claimed or now
    redis.call('HSET', key, 'state', 'running', 'worker', worker, 'epoch', request.epoch + 1,
      'attempts', request.attempts + 1, 'claimed', claimed, 'had', now,
      'lease', lease, 'charged', request.charged)
    local queued = math.max(0, claimed - request.created)
    redis.call('ZADD', prefix .. 'leases', now + lease, id)
    local log = request.tokens > 0 and redis.call('LRANGE', log_key(id), 0, -1) or {}
    reply[#reply + 1] = { more[2], request.epoch + 1, request.attempts + 1, request.deadline,
      log, tonumber(class), counter, queued }
  end
end

-- How fast the whole queue moves: the time between two that leave it, while others wait all the time.
local left = #reply - 1
local since
if left > 0 then
  since = tonumber(redis.call('GET', prefix .. 'moved') or nil)
  if since then
    local interval, known = (now - since) / left, tonumber(redis.call('GET', prefix .. 'interval') or nil)
    if known then interval = known + NEWEST * (interval - known) end
    redis.call('SET', prefix .. 'interval', interval, 'PX', INTERVAL_KEPT)
  end
end
if any_waits == nil then any_waits = redis.call('EXISTS', prefix .. 'tiers') == 1 end
if not any_waits then
  if since or left == 0 then redis.call('DEL', prefix .. 'moved') end
elseif left > 0 then
  redis.call('SET', prefix .. 'moved', now, 'PX', PACE_KEPT)
end

-- What else the worker has room for: whoever comes while nothing waits need not wait to be asked for.
local offers, more_room = prefix .. 'offers', count - left
if more_room > 0 and tonumber(ARGV[6]) > 0 then
  redis.call('ZADD', offers, more_room, worker)
  redis.call('PEXPIRE', offers, 60000)
  redis.call('SET', prefix .. 'offer:' .. worker, lease, 'PX', ARGV[6])
else
  redis.call('ZREM', offers, worker)
end

publish_told()
return reply
