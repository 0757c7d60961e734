-- One engine step of one worker: appends what it made to the token logs, tells the live channels,
-- renews the leases of all it holds, ends what is finished, and says what has become of each.
--
-- A repeat changes nothing: chunks that the log has are skipped by their sequence number.
-- A worker whose epoch is old, whose lease was given away, or that is ahead of the log (a server
-- that lost its last writes) is fenced: nothing of it is written, and it must drop the request.
--
-- KEYS[1]   prefix of the model's keys
-- ARGV[1]   lease, ms
-- ARGV[2]   what is held, a MessagePack array of [request id, epoch, [[index of first token, number of
--           tokens, is last, bytes of the Chunk], ...]]
-- ARGV[3]   all Chunks (MessagePack) in that order, end to end. Two arguments and not hundreds, because
--           clients are slow at packing many; and apart, because cmsgpack reads no binaries
-- ARGV[4]   worker id: a server that lost its last writes gives an epoch twice
-- Returns   an integer per request: 0 ok, 1 cancelled (abort it, then publish its last chunk), 2 fenced;
--           then the best tier rank that has a backlog, -1 when nothing waits
-- Example   EVALSHA sha 1 weir:{m:smollm2}: 10000 <[["r1", 1, [[17, 1, false, 80]]], ["r2", 3, []]]> <80 bytes> w1
--@include request
local lease_end = now + tonumber(ARGV[1])
local verdicts, renewed = {}, {}
local charges = {} -- rank -> tenant -> amount: one command per tenant, not per request

local all_chunks, read = ARGV[3], 0
for n, held in ipairs(cmsgpack.unpack(ARGV[2])) do
  local id, epoch, chunks = held[1], held[2], held[3]
  local key = request_key(id)
  local request, f -- all of it where this is its end, else what a step must know
  local ends = #chunks > 0 and chunks[#chunks][3]
  if ends then request = find(id) end
  if request then
    f = { request.state, request.epoch, request.tokens, request.channels, request.cancel and '1', request.rank,
      request.tenant, request.weight, request.charged, request.worker }
  else
    f = redis.call('HMGET', key, 'state', 'epoch', 'tokens', 'channels', 'cancel', 'rank', 'tenant', 'weight',
      'charged', 'worker')
  end
  local verdict = f[5] == '1' and 1 or 0

  if tonumber(f[2] or nil) ~= epoch or f[1] == 'queued' or f[10] ~= (ARGV[4] or f[10]) then
    verdict = 2
  elseif f[1] == 'finished' or f[1] == 'dead' then
    -- Its own last chunk again is a repeat; anything else comes after another hand ended it.
    if not ends then verdict = 2 end
  else
    local tokens = tonumber(f[3])
    local before = tokens
    local entries, last = {}, nil
    local at = read
    for _, chunk in ipairs(chunks) do
      local seq, length, is_last, bytes = chunk[1], chunk[2], chunk[3], string.sub(all_chunks, at + 1, at + chunk[4])
      at = at + chunk[4]
      if is_last and seq == tokens then
        last = bytes
        tokens = tokens + length
      elseif seq == tokens then
        entries[#entries + 1] = bytes
        tokens = tokens + length
      elseif seq + length > tokens then
        verdict = 2
        break
      end
    end
    if verdict == 2 then
      -- Back to the queue at the next sweep, to go on from what the log has.
      redis.call('ZADD', prefix .. 'leases', 0, id)
    else
      for _, entry in ipairs(entries) do tell(f[4], entry) end
      if #entries > 0 then redis.call('RPUSH', log_key(id), unpack(entries)) end
      if tokens > before then
        local charged, weight = tonumber(f[9] or before), tonumber(f[8] or 1)
        if last then
          request.tokens, request.charged = tokens, math.max(tokens, charged)
          if before == 0 then request.first_token = now end
        else
          local fields = { 'tokens', tokens, 'charged', math.max(tokens, charged) }
          if before == 0 then fields[5], fields[6] = 'first_token', now end
          redis.call('HSET', key, unpack(fields))
        end
        if tokens > charged then
          local of_tier = charges[f[6]] or {}
          charges[f[6]] = of_tier
          of_tier[f[7]] = (of_tier[f[7]] or 0) + cost(W_OUT * tokens, weight) - cost(W_OUT * charged, weight)
        end
      end
      if last then
        finish(request, cmsgpack.unpack(last).finish, last)
      else
        renewed[#renewed + 1] = lease_end
        renewed[#renewed + 1] = id
      end
    end
  end
  for _, chunk in ipairs(chunks) do read = read + chunk[4] end
  verdicts[n] = verdict
end

if #renewed > 0 then redis.call('ZADD', prefix .. 'leases', unpack(renewed)) end
for rank, of_tier in pairs(charges) do
  for tenant, amount in pairs(of_tier) do charge(rank, tenant, amount) end
end
publish_told()
verdicts[#verdicts + 1] = tonumber(redis.call('ZRANGE', prefix .. 'tiers', 0, 0)[1] or -1)
return verdicts
