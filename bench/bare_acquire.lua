-- The fewest commands of a fenced acquire: take the lock if it is free, and return a token that only rises.
-- KEYS: lock, counter. ARGV: id, ttl in ms.
if not redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return false
end
local time = redis.call('TIME')
local token = math.max((tonumber(redis.call('GET', KEYS[2])) or 0) + 1, time[1] * 1000000 + time[2])
redis.call('SET', KEYS[2], string.format('%.0f', token))
return token
