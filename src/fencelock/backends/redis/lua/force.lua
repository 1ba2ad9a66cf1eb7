-- Drop whoever holds the name, raise the token past theirs, hand over. Returns how many were dropped.
-- KEYS: base.  ARGV: name.
local BASE, NAME = KEYS[1], ARGV[1]
-- include queue.lua
local dropped = redis.call('EXISTS', LOCK)
for _, holder in ipairs(redis.call('HVALS', HOLDERS)) do
  if tonumber(string.match(holder, '^%d+')) > now then dropped = dropped + 1 end
end
mint()
redis.call('DEL', LOCK, HOLDERS)
settle()
return dropped
