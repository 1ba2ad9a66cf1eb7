-- Read only. Returns the holders and waiters that have not expired: {ms left, token, mode, owner} of each holder, {ms left,
-- mode, owner} of each waiter in queue order; and the server's clock in µs, from which the age of a token follows.
-- KEYS: base.  ARGV: name.
local BASE, NAME = KEYS[1], ARGV[1]
-- include queue.lua
local holders, waiters = {}, {}
local token, owner = string.match(exclusive or '', '^[^:]*:(%d+):%d+:(.*)$')
if token then holders[1] = {redis.call('PTTL', LOCK), tonumber(token), 'x', owner} end
for i = 2, #sharing, 2 do
  local ends, minted, mode, who = string.match(sharing[i], '^(%d+):(%d+):%d+:([^:]*):(.*)$')
  if tonumber(ends) > now then holders[#holders + 1] = {ends - now, tonumber(minted), mode, who} end
end
for _, id in ipairs(redis.call('LRANGE', QUEUE, 0, -1)) do
  local ends, mode, who = string.match(redis.call('HGET', WAITERS, id) or '', '^(%d+):%d+:([^:]*):[^:]*:%d+:(.*)$')
  if ends and tonumber(ends) > now then waiters[#waiters + 1] = {ends - now, mode, who} end
end
return {holders, waiters, tonumber(clock)}
