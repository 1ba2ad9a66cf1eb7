-- Drop whoever holds the name, raise the token past theirs, hand over. Returns how many were dropped.
-- KEYS: token, holders, queue, waiters.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- include queue.lua
local dropped = 0
for _, holder in ipairs(redis.call('HVALS', HOLDERS)) do
  if tonumber(string.match(holder, '^%d+')) > now then dropped = dropped + 1 end
end
mint()
redis.call('DEL', HOLDERS)
settle()
return dropped
