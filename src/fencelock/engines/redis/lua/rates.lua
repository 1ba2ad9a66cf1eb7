-- Read only. Returns the server's clock in µs, and the time that each rate limit has stored, or 0.
-- KEYS: the key of each limit.
local time = redis.call('TIME')
local found = {time[1] * 1000000 + time[2]}
for i, key in ipairs(KEYS) do found[i + 1] = tonumber(redis.call('GET', key) or 0) end
return found
