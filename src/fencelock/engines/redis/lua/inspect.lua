-- Read only. Returns the holders, the waiters in queue order, and the server's clock in µs, from which the age of a token
-- follows: {ms left, token (false: it waits), mode, label} of each claim that has not expired.
-- KEYS: base.  ARGV: name.
local BASE, NAME = KEYS[1], ARGV[1]
-- include name.lua
-- include grant.lua
-- include queue.lua
local holders, waiters = {}, {}
local held_token, held_label = string.match(exclusive or '', '^[^:]*:(%d+):%d+:(.*)$')
if held_token then holders[1] = {redis.call('PTTL', LOCK), tonumber(held_token), 'x', held_label} end
for i = 2, #sharing, 2 do
  local ends, minted, mode, label = string.match(sharing[i], '^(%d+):(%d+):%d+:([^:]*):(.*)$')
  if tonumber(ends) > now then holders[#holders + 1] = {ends - now, tonumber(minted), mode, label} end
end
for _, id in ipairs(redis.call('LRANGE', QUEUE, 0, -1)) do
  local ends, mode, label = string.match(redis.call('HGET', WAITERS, id) or '', '^(%d+):%d+:([^:]*):[^:]*:%d+:(.*)$')
  if ends and tonumber(ends) > now then waiters[#waiters + 1] = {ends - now, false, mode, label} end
end
return {holders, waiters, tonumber(clock)}
