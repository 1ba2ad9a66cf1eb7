-- Drop all holders of the name, mint a token above theirs, and admit the next waiters. Returns how many were dropped.
-- KEYS: base.  ARGV: name.
local BASE, NAME = KEYS[1], ARGV[1]
-- include name.lua
-- include grant.lua
-- include queue.lua
local dropped = exclusive and 1 or 0
for i = 2, #sharing, 2 do
  if tonumber(string.match(sharing[i], '^%d+')) > now then dropped = dropped + 1 end
end
mint()
redis.call('DEL', LOCK, HOLDERS)
exclusive, sharing = false, {}
advance_queue()
return dropped
