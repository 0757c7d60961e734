-- One engine step of one worker: appends what it made to the token logs, tells the live channels,
-- renews the leases of all it holds, ends what is finished, and says what has become of each.
--
-- A repeat changes nothing: chunks that the log has are skipped by their sequence number.
-- A worker whose epoch is old, whose lease was given away, or that is ahead of the log (a server
-- that lost its last writes) is fenced: nothing of it is written, and it must drop the request.
--
-- KEYS[1]   prefix of the model's keys
-- ARGV[1]   lease, ms
-- ARGV[2]   n, requests held
-- ARGV[3..] n times: request id, epoch, number of chunks m, then m times:
--           index of its first token, number of tokens, 1 if it is the last else 0, Chunk (MessagePack)
-- Returns   n integers: 0 ok, 1 cancelled (abort it, then publish its last chunk), 2 fenced
-- Example   EVALSHA sha 1 weir:{m:smollm2}: 10000 2 r1 1 1 17 1 0 <chunk> r2 3 0
--@include request
local lease_end = now + tonumber(ARGV[1])
local verdicts, renewed = {}, {}
local at = 3

for held = 1, tonumber(ARGV[2]) do
  local id, epoch, count = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local first = at + 3
  at = first + 4 * count
  local key = request_key(id)
  local f = redis.call('HMGET', key, 'state', 'epoch', 'tokens', 'channels', 'cancel')
  local verdict = f[5] == '1' and 1 or 0

  if f[2] ~= epoch or f[1] == 'queued' then
    verdict = 2
  elseif f[1] == 'finished' then
    -- Its own last chunk again is a repeat; anything else comes after another hand ended it.
    if count == 0 or ARGV[at - 2] ~= '1' then verdict = 2 end
  else
    local tokens = tonumber(f[3])
    local before = tokens
    local entries, last = {}, nil
    for i = first, at - 4, 4 do
      local seq, length = tonumber(ARGV[i]), tonumber(ARGV[i + 1])
      if ARGV[i + 2] == '1' and seq == tokens then
        last = ARGV[i + 3]
        tokens = tokens + length
      elseif seq == tokens then
        entries[#entries + 1] = ARGV[i + 3]
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
        if before == 0 then redis.call('HSETNX', key, 'first_token', now) end
        redis.call('HSET', key, 'tokens', tokens)
      end
      if last then
        finish(find(id), cmsgpack.unpack(last).finish, last)
      else
        renewed[#renewed + 1] = lease_end
        renewed[#renewed + 1] = id
      end
    end
  end
  verdicts[held] = verdict
end

if #renewed > 0 then redis.call('ZADD', prefix .. 'leases', unpack(renewed)) end
publish_told()
return verdicts
