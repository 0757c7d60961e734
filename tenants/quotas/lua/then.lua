-- Reserves, and where all that was asked for is granted goes on with another script of this server's, in the same
-- call. In front stand `reserve` and `follow`: the texts of both scripts, as functions of their KEYS and ARGV.
--
-- KEYS[1..]  reserve's; the last one is the other script's only key
-- ARGV[1]    how many of the arguments that follow are reserve's
-- ARGV[2..]  reserve's, then the other script's. In its last one each byte 1 stands for a number: of each bucket
--            in turn what remains, and the ms until it is full
-- returns    {what reserve returns, what the other script returns, where it ran}
--
-- Not on a cluster, where the keys of the two lie apart. Nothing comes between the two, but what the first one did
-- stays when the second one refuses or fails: the caller gives it back, as it would after two calls.

local taken = tonumber(ARGV[1])
local reservation = {unpack(ARGV, 2, 1 + taken)}
local reply = reserve({unpack(KEYS, 1, #KEYS - 1)}, reservation)
if reply[1] ~= 'admitted' or reply[5] ~= tonumber(reservation[3]) then return {reply} end

local more = {unpack(ARGV, 2 + taken)}
local at = 5
local function next_state()
  at = at + 1
  return reply[at]
end
more[#more] = string.gsub(more[#more], '\1', next_state)
return {reply, follow({KEYS[#KEYS]}, more)}
