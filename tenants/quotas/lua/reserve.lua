-- Takes from every bucket that applies, or from none.
--
-- KEYS[1]   reservation record   weir:{t:TENANT}:reservation:ID
-- KEYS[2..] buckets              weir:{t:TENANT}:quota:SCOPE:OWNER:METRIC:PERIOD_S
-- ARGV[1]   reservation id
-- ARGV[2]   prompt tokens
-- ARGV[3]   largest number of output tokens
-- ARGV[4]   lease, ms: how long a concurrency slot is held when nobody settles
-- ARGV[5]   life of the record, ms
-- ARGV[6..] per bucket: metric, amount, period in s (0: concurrency), burst
-- returns   {verdict, binding bucket from 1 or 0, retry after ms or -1 (never), asked of the binding
--           bucket, then per bucket: remaining in whole units, ms until full}
--           verdict: 'admitted', 'refused', or 'closed' (this id was settled or released before)
--
-- A second call with the same id takes nothing more and is admitted again: a caller whose connection broke
-- may ask again.
--
-- A token bucket is asked for prompt + output, but at most for its burst when the prompt alone fits: the
-- output may turn out shorter, and settling charges the exact figure. A prompt above the burst never fits.
--
-- Example: EVALSHA sha 2 weir:{t:T}:reservation:r1 weir:{t:T}:quota:tenant:T:tokens:60
--          r1 20 100 60000 960000 tokens 6000 60 6000  ->  {admitted, 0, 0, 0, 5880, 1200}

local id, prompt, output = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local lease, record_ttl = tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_ms()
local buckets = buckets_from(2, 6)

local function answer(verdict, binding, retry, asked)
  local reply = {verdict, binding, retry, asked}
  for _, bucket in ipairs(buckets) do
    local state = state_of(bucket, now)
    reply[#reply + 1] = state[1]
    reply[#reply + 1] = state[2]
  end
  return reply
end

local state = redis.call('HGET', KEYS[1], 'state')
if state == 'reserved' then return answer('admitted', 0, 0, 0) end
if state then return answer('closed', 0, 0, 0) end

-- How long a refused caller should wait for a slot: a request may end at any moment, so it is worth asking
-- again soon, and not only when a lease would lapse.
local SLOT_POLL_MS = 1000

local binding, wait, asked = 0, 0, 0
local function refuse(index, ms, units)
  -- Of several that refuse, the one that refuses longest binds; -1 is for ever.
  if wait == -1 then return end
  if binding == 0 or ms == -1 or ms > wait then binding, wait, asked = index, ms, units end
end

for i, bucket in ipairs(buckets) do
  if bucket.period == 0 then
    redis.call('ZREMRANGEBYSCORE', bucket.key, '-inf', text(now))
    bucket.taken = 1
    local used = redis.call('ZCARD', bucket.key)
    if used >= bucket.amount then
      local lapse = redis.call('ZRANGE', bucket.key, used - bucket.amount, used - bucket.amount, 'WITHSCORES')
      refuse(i, math.max(1, math.min(SLOT_POLL_MS, tonumber(lapse[2]) - now)), 1)
    end
  else
    local units = 1
    if bucket.metric == 'tokens' then
      units = prompt + output
      if units > bucket.burst and prompt <= bucket.burst then units = bucket.burst end
    end
    bucket.taken = units * 1000
    bucket.level, bucket.rem = level_now(bucket, now)
    if units > bucket.burst then
      refuse(i, -1, prompt)
    elseif bucket.level < bucket.taken then
      refuse(i, wait_for(bucket, bucket.level, bucket.rem, bucket.taken), units)
    end
  end
end

if binding > 0 then return answer('refused', binding, wait, asked) end

local record = {}
for i, bucket in ipairs(buckets) do
  if bucket.period == 0 then
    take_slot(bucket, id, now + lease)
  else
    store_level(bucket, bucket.level - bucket.taken, bucket.rem, now)
  end
  record[i] = {bucket.key, bucket.metric, bucket.amount, bucket.period, bucket.burst, bucket.taken}
end
redis.call('HSET', KEYS[1], 'state', 'reserved', 'buckets', cmsgpack.pack(record))
redis.call('PEXPIRE', KEYS[1], text(record_ttl))
return answer('admitted', 0, 0, 0)
