-- Shared by the scripts beside it, which are each loaded with this text in front.
--
-- A token bucket is a hash {level, at, rem, kept}: `level` in milli-units (may be below 0 after a charge that
-- was larger than reserved), `at` the server's time in ms, `rem` the part of a milli-unit not yet granted,
-- in 1/period. It gains amount/period milli-units per ms, in integers, without loss. An absent key is a
-- full bucket, and each key lives until it would be full, or a minute longer, so expiry changes nothing:
-- until `kept`, the server's time in ms.
--
-- A concurrency limit is a sorted set of reservation ids by the ms at which each lease lapses.
--
-- A budget is a hash {spent, reserved} of one calendar period, which is part of its key, so that there is
-- nothing to reset. What is settled is spent; what is reserved may yet turn out less. One that was put back from
-- the ledger has `through`: the last row of which its `spent` tells.
--
-- A bucket is a table {key, metric, amount, period, burst, hard, known_as}: `period` in s, SLOTS or BUDGET;
-- `burst` of a rate; of a budget the ms at which its period ends; `hard` of a budget: it refuses, and does not
-- only count.
--
-- `warm` is a set of what Redis knows: SCOPE:OWNER for the owner's rates, SCOPE:OWNER:METRIC:SERIAL for a budget.
-- What is in it and absent is full: a rate that has refilled, a period in which nothing was used. It lives for
-- ever: without it an absent bucket could not be told from a full one.
--
-- `open` is a sorted set of a tenant's reservations that are neither settled nor released, by the ms after which
-- whoever made them is taken for dead.
local SLOTS, BUDGET = 0, -1
local BUDGET_KEPT_MS = 3 * 86400000  -- after its period's end, for settlements that come late

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

local function text(number)
  return string.format('%.0f', number + 0)  -- tostring() would write 1e+15; and -0 + 0 is 0, where -0 is no integer
end

local function capacity(bucket)
  return bucket.burst * 1000
end

-- Level now, in milli-units, and the remainder that goes with it. Notes until when it is kept.
local function level_now(bucket, now)
  local stored = redis.call('HMGET', bucket.key, 'level', 'at', 'rem', 'kept')
  local full = capacity(bucket)
  bucket.kept = tonumber(stored[4] or 0)
  if not stored[1] then return full, 0 end
  local level, at, rem = tonumber(stored[1]), tonumber(stored[2]), tonumber(stored[3])
  local elapsed = math.max(0, now - at)  -- a clock that stepped back grants nothing
  local missing = full - level
  if missing <= 0 then return full, 0 end  -- the limit was lowered
  -- Compared by division first: the product below stays under 2^53 only while the bucket is not full.
  if elapsed >= missing * bucket.period / bucket.amount then return full, 0 end
  local units = elapsed * bucket.amount + rem
  local granted = math.floor(units / bucket.period)
  if granted >= missing then return full, 0 end
  return level + granted, units - granted * bucket.period
end

-- Lets a key live for `ms` at least, and for `more` in addition where it would end before: so most calls have nothing to
-- write. A write costs the server many times what a look does.
local function keep(key, ms, more)
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, text(ms + more)) end
end

local function store_level(bucket, level, rem, now)
  local missing = capacity(bucket) - level
  if missing <= 0 then
    redis.call('DEL', bucket.key)
    return
  end
  local full_at = now + math.ceil(missing * bucket.period / bucket.amount)
  if (bucket.kept or 0) >= full_at then
    redis.call('HSET', bucket.key, 'level', text(level), 'at', text(now), 'rem', text(rem))
    return
  end
  bucket.kept = full_at + 60000
  redis.call('HSET', bucket.key, 'level', text(level), 'at', text(now), 'rem', text(rem), 'kept', text(bucket.kept))
  redis.call('PEXPIREAT', bucket.key, text(bucket.kept))
end

-- Milliseconds until the bucket holds `wanted` milli-units.
local function wait_for(bucket, level, rem, wanted)
  if level >= wanted then return 0 end
  return math.max(1, math.ceil(((wanted - level) * bucket.period - rem) / bucket.amount))
end

-- Adds `delta` milli-units (a refund, or below 0 a charge); never above the burst.
local function adjust(bucket, delta, now)
  if delta == 0 then return end
  local level, rem = level_now(bucket, now)
  store_level(bucket, math.min(capacity(bucket), level + delta), rem, now)
end

local function slots_used(bucket, now)
  return redis.call('ZCOUNT', bucket.key, '(' .. text(now), '+inf')
end

local function free_slot(bucket, id)
  redis.call('ZREM', bucket.key, id)
end

-- Returns how many are taken more, 0 or 1, and when the last lease lapses. The key lives for an hour after that, or two:
-- it is told so, and rid of what has lapsed, where the last lease is of a later hour than all before.
local HOUR_MS = 3600000
local function take_slot(bucket, id, lapses_at, now)
  local before = tonumber(redis.call('ZRANGE', bucket.key, -1, -1, 'WITHSCORES')[2] or 0)
  local taken = redis.call('ZADD', bucket.key, text(lapses_at), id)
  local last = math.max(before, lapses_at)
  local hour = math.floor(last / HOUR_MS)
  if hour > math.floor(before / HOUR_MS) then
    redis.call('ZREMRANGEBYSCORE', bucket.key, '-inf', text(now))
    redis.call('PEXPIREAT', bucket.key, text((hour + 2) * HOUR_MS))
  end
  return taken, last
end

local function budget_of(bucket)
  local stored = redis.call('HMGET', bucket.key, 'spent', 'reserved')
  return tonumber(stored[1] or 0), tonumber(stored[2] or 0)
end

-- Only where it is still there: a budget that is gone starts from the ledger, which has this too.
local function count_in_budget(bucket, spent, reserved)
  if redis.call('EXISTS', bucket.key) == 0 then return end
  redis.call('HINCRBY', bucket.key, 'spent', text(spent))
  redis.call('HINCRBY', bucket.key, 'reserved', text(reserved))
end

local function state_of_rate(bucket, level, rem)
  return {math.max(0, math.floor(level / 1000)), wait_for(bucket, level, rem, capacity(bucket))}
end

-- {remaining in whole units, ms until full}
local function state_of(bucket, now)
  if bucket.period == BUDGET then
    local spent, reserved = budget_of(bucket)
    return {math.max(0, bucket.amount - spent - reserved), math.max(0, bucket.burst - now)}
  end
  if bucket.period == SLOTS then
    local last = redis.call('ZRANGE', bucket.key, -1, -1, 'WITHSCORES')
    local reset = last[2] and math.max(0, tonumber(last[2]) - now) or 0
    return {math.max(0, bucket.amount - slots_used(bucket, now)), reset}
  end
  return state_of_rate(bucket, level_now(bucket, now))
end

-- Buckets from ARGV, six values each (metric, amount, period, burst, hard, known as), and as many keys.
local function buckets_from(first_key, first_arg)
  local buckets = {}
  for i = first_key, #KEYS do
    local a = first_arg + (i - first_key) * 6
    buckets[#buckets + 1] = {
      key = KEYS[i], metric = ARGV[a], amount = tonumber(ARGV[a + 1]),
      period = tonumber(ARGV[a + 2]), burst = tonumber(ARGV[a + 3]), hard = ARGV[a + 4] == '1',
      known_as = ARGV[a + 5],
    }
  end
  return buckets
end

-- {'cold', i, ...}: the numbers of the buckets that Redis does not know, or nil. Slots are never recalled.
local function cold_of(buckets, warm)
  local cold, at, names = {'cold'}, {}, {}
  for i, bucket in ipairs(buckets) do
    if bucket.period ~= SLOTS then
      at[#at + 1], names[#names + 1] = i, bucket.known_as
    end
  end
  if #names == 0 then return nil end
  for i, is_known in ipairs(redis.call('SMISMEMBER', warm, unpack(names))) do
    if is_known == 0 then cold[#cold + 1] = at[i] end
  end
  if #cold > 1 then return cold end
end

-- The reservation's buckets, with what was taken from each, as reserve.lua wrote them.
-- Their keys are not in KEYS: the caller does not know them. They carry the same hash tag as KEYS[1], so
-- they live on the same node of a cluster.
local function buckets_of(record)
  local buckets = {}
  for _, b in ipairs(cmsgpack.unpack(record)) do
    buckets[#buckets + 1] = {key = b[1], metric = b[2], amount = b[3], period = b[4], burst = b[5], taken = b[6]}
  end
  return buckets
end

-- Undoes a reservation that is open: every unit goes back, slots are freed.
local function give_back(record_key, id, now)
  local record = redis.call('HGET', record_key, 'buckets')
  if not record or record == '' then return end -- gone, or settled
  for _, bucket in ipairs(buckets_of(record)) do
    if bucket.period == SLOTS then
      free_slot(bucket, id)
    elseif bucket.period == BUDGET then
      count_in_budget(bucket, 0, -bucket.taken)
    else
      adjust(bucket, bucket.taken, now)
    end
  end
  redis.call('HSET', record_key, 'state', 'released')
end
