-- Takes from every bucket that applies, or from none.
--
-- KEYS[1]   reservation record   weir:{t:TENANT}:reservation:ID
-- KEYS[2]   open reservations    weir:{t:TENANT}:open
-- KEYS[3]   what is known        weir:{t:TENANT}:warm
-- KEYS[4..] buckets              weir:{t:TENANT}:quota:SCOPE:OWNER:METRIC:PERIOD_S, or for a budget
--                                weir:{t:TENANT}:budget:SCOPE:OWNER:METRIC:SERIAL:PERIOD
-- ARGV[1]   reservation id
-- ARGV[2]   prompt tokens
-- ARGV[3]   largest number of output tokens
-- ARGV[4]   lease, ms: how long a concurrency slot is held when nobody settles
-- ARGV[5]   how long after its lease the reservation is taken for dead, ms
-- ARGV[6]   life of the record, ms
-- ARGV[7]   what the prompt costs at most, micro-USD
-- ARGV[8]   what output costs, micro-USD per million tokens
-- ARGV[9]   1: what Redis does not know is to be recalled from the ledger first; 0: it is taken for full
-- ARGV[10]  1: it runs already, and Redis has forgotten it: all that it holds is taken again, whatever is left
-- ARGV[11..] per bucket: metric, amount, period, burst, hard, known as (see bucket.lua)
-- returns   {verdict, binding bucket from 1 or 0, retry after ms or -1 (never), asked of the binding
--           bucket, granted output tokens, then per bucket: remaining in whole units, ms until full}
--           verdict: 'admitted'; 'refused'; 'spent' (a budget is used up); 'closed' (this id was settled or
--           released before); or {'cold', i, ...}: the buckets with these numbers must be restored first
--
-- A second call with the same id takes nothing more and is admitted again: a caller whose connection broke
-- may ask again.
--
-- A rate is asked for the whole output, but at most for its burst when the prompt alone fits: the output may
-- turn out shorter, and settling charges the exact figure. A prompt above the burst never fits. A hard budget
-- is never overdrawn: where it has less left than the whole output, fewer output tokens are granted.
--
-- Reservations of the dead are given back here, a few at a time: only who asks needs what they hold.
--
-- Example: EVALSHA sha 4 weir:{t:T}:reservation:r1 weir:{t:T}:open weir:{t:T}:warm weir:{t:T}:quota:tenant:T:tokens:60
--          r1 20 100 60000 60000 86460000 0 0 0 0 tokens 6000 60 6000 1 tenant:T  ->  {admitted, 0, 0, 0, 100, 5880, 1200}

local id, prompt, output = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local lease, grace, record_ttl = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local prompt_cost, output_price = tonumber(ARGV[7]), tonumber(ARGV[8])
local runs_already = ARGV[10] == '1'
local now = now_ms()
local buckets = buckets_from(4, 11)

local record_prefix = string.sub(KEYS[1], 1, #KEYS[1] - #id)
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', text(now), 'LIMIT', 0, 20)) do
  give_back(record_prefix .. dead, dead, now)
  redis.call('ZREM', KEYS[2], dead)
end

local function answer(verdict, binding, retry, asked, granted)
  local reply = {verdict, binding, retry, asked, granted}
  for _, bucket in ipairs(buckets) do
    local state = bucket.state or state_of(bucket, now)
    reply[#reply + 1] = state[1]
    reply[#reply + 1] = state[2]
  end
  return reply
end

local before = redis.call('HMGET', KEYS[1], 'state', 'granted')
if before[1] == 'reserved' then return answer('admitted', 0, 0, 0, tonumber(before[2])) end
if before[1] then return answer('closed', 0, 0, 0, 0) end

if ARGV[9] == '1' then
  local cold = cold_of(buckets, KEYS[3])
  if cold then return cold end
end

local function cost_of(tokens)
  return math.ceil(tokens * output_price / 1000000)
end

-- What a bucket of this metric is asked for when the output has so many tokens.
local function asked_of(bucket, tokens)
  if bucket.metric == 'requests' then return 1 end
  if bucket.metric == 'input_tokens' then return prompt end
  if bucket.metric == 'output_tokens' then return tokens end
  if bucket.metric == 'tokens' then return prompt + tokens end
  return prompt_cost + cost_of(tokens)
end

-- The largest output for which `left` is enough, given that it is for the smallest.
local function output_within(bucket, left)
  if bucket.metric == 'output_tokens' then return math.min(output, left) end
  if bucket.metric == 'tokens' then return math.min(output, left - prompt) end
  if bucket.metric == 'input_tokens' or output_price == 0 then return output end
  local tokens = math.min(output, math.floor((left - prompt_cost) * 1000000 / output_price))
  while tokens > 0 and prompt_cost + cost_of(tokens) > left do tokens = tokens - 1 end
  return tokens
end

-- How long a refused caller should wait for a slot, or for what others have reserved of a budget: a request may
-- end at any moment, so it is worth asking again soon, and not only when a lease would lapse.
local POLL_MS = 1000

local verdict, binding, wait, asked = 'refused', 0, 0, 0
local function refuse(index, ms, units, kind)
  -- Of several that refuse, the one that refuses longest binds; -1 is for ever.
  if wait == -1 or runs_already then return end
  if binding == 0 or ms == -1 or ms > wait then
    verdict, binding, wait, asked = kind or 'refused', index, ms, units
  end
end

-- Budgets first: they decide how much output is granted, and so what the rates are asked for.
local granted = output
for i, bucket in ipairs(buckets) do
  if bucket.period == BUDGET and bucket.hard and not runs_already then
    local spent, reserved = budget_of(bucket)
    local least = asked_of(bucket, math.min(1, output))
    if least > bucket.amount then
      refuse(i, -1, least)
    elseif least > bucket.amount - spent then
      refuse(i, math.max(1, bucket.burst - now), least, 'spent')
    elseif least > bucket.amount - spent - reserved then
      refuse(i, math.max(1, math.min(POLL_MS, bucket.burst - now)), least)
    else
      granted = math.min(granted, output_within(bucket, bucket.amount - spent - reserved))
    end
  end
end

for i, bucket in ipairs(buckets) do
  if bucket.period == SLOTS then
    bucket.taken = 1
    local used = slots_used(bucket, now)
    bucket.used = used
    if used >= bucket.amount and not runs_already then
      redis.call('ZREMRANGEBYSCORE', bucket.key, '-inf', text(now))
      local lapse = redis.call('ZRANGE', bucket.key, used - bucket.amount, used - bucket.amount, 'WITHSCORES')
      refuse(i, math.max(1, math.min(POLL_MS, tonumber(lapse[2]) - now)), 1)
    end
  elseif bucket.period == BUDGET then
    bucket.taken = asked_of(bucket, granted)
  else
    local least = asked_of(bucket, 0)
    local units = math.min(asked_of(bucket, granted), math.max(least, bucket.burst))
    bucket.taken = units * 1000
    bucket.level, bucket.rem = level_now(bucket, now)
    if least > bucket.burst then
      refuse(i, -1, least)
    elseif bucket.level < bucket.taken then
      refuse(i, wait_for(bucket, bucket.level, bucket.rem, bucket.taken), units)
    end
  end
end

if binding > 0 then return answer(verdict, binding, wait, asked, 0) end

-- What is left is known from what was taken: the answer asks nothing again.
local record = {}
for i, bucket in ipairs(buckets) do
  if bucket.period == SLOTS then
    local taken, last = take_slot(bucket, id, now + lease, now)
    bucket.state = {math.max(0, bucket.amount - bucket.used - taken), math.max(0, last - now)}
  elseif bucket.period == BUDGET then
    redis.call('HINCRBY', bucket.key, 'reserved', text(bucket.taken))
    redis.call('PEXPIREAT', bucket.key, text(bucket.burst + BUDGET_KEPT_MS))
  else
    local level = bucket.level - bucket.taken
    store_level(bucket, level, bucket.rem, now)
    bucket.state = state_of_rate(bucket, level, bucket.rem)
  end
  record[i] = {bucket.key, bucket.metric, bucket.amount, bucket.period, bucket.burst, bucket.taken}
end
redis.call('HSET', KEYS[1], 'state', 'reserved', 'buckets', cmsgpack.pack(record), 'granted', text(granted))
redis.call('PEXPIRE', KEYS[1], text(record_ttl))
redis.call('ZADD', KEYS[2], text(now + lease + grace), id)
keep(KEYS[2], record_ttl, 3600000)
return answer('admitted', 0, 0, 0, granted)
