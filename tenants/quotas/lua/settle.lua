-- Charges what requests of one tenant really used: gives back the unused part, takes what went beyond, frees their slots.
--
-- KEYS[1]   open reservations     weir:{t:TENANT}:open
-- KEYS[2..] reservation records   weir:{t:TENANT}:reservation:ID
-- ARGV[1]   how long a settled record is remembered, ms
-- ARGV[2..] per record: reservation id, prompt tokens, output tokens, cost in micro-USD
-- returns   per record: 1 when this call settled it; 0 when it was settled before; -1 when the id is not known (any more)
--
-- Settled once, by whoever comes first: the gateway at the end of the stream, the ledger later. After a
-- release it still charges in full: usage proves that the request did run after all.
--
-- What they hold of one bucket changes it once: a write costs the server many times what adding up does.
--
-- Example: EVALSHA sha 2 weir:{t:T}:open weir:{t:T}:reservation:r1 600000 r1 20 35 0  ->  {1}

local verdicts, settled = {}, {}
local rates, slots, budgets = {}, {}, {} -- by key: {bucket, change in milli-units}, {id, ...}, {spent, reserved}

local function settle_bucket(bucket, id, taken, used)
  local key = bucket.key
  if bucket.period == SLOTS then
    slots[key] = slots[key] or {}
    table.insert(slots[key], id)
  elseif bucket.period == BUDGET then
    local known = budgets[key] or {0, 0}
    budgets[key] = {known[1] + used, known[2] - taken}
  else
    local known = rates[key] or {bucket, 0}
    rates[key] = {bucket, known[2] + taken - used * 1000}
  end
end

for i = 2, #KEYS do
  local at = 2 + (i - 2) * 4
  local id, prompt, output, cost = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3])
  local record = redis.call('HMGET', KEYS[i], 'state', 'buckets')
  local state, verdict = record[1], 1
  if not state then
    verdict = -1
  elseif state == 'settled' then
    verdict = 0
  else
    local used = {requests = 1, input_tokens = prompt, output_tokens = output, tokens = prompt + output, cost = cost}
    for _, bucket in ipairs(buckets_of(record[2])) do
      settle_bucket(bucket, id, state == 'released' and 0 or bucket.taken, used[bucket.metric])
    end
    redis.call('HSET', KEYS[i], 'state', 'settled', 'buckets', '')
    redis.call('PEXPIRE', KEYS[i], ARGV[1])
    settled[#settled + 1] = id
  end
  verdicts[#verdicts + 1] = verdict
end

local now = now_ms()
for _, rate in pairs(rates) do adjust(rate[1], rate[2], now) end
for key, ids in pairs(slots) do redis.call('ZREM', key, unpack(ids)) end
for key, counts in pairs(budgets) do count_in_budget({key = key}, counts[1], counts[2]) end
if #settled > 0 then redis.call('ZREM', KEYS[1], unpack(settled)) end
return verdicts
