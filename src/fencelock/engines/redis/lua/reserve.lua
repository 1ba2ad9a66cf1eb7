-- Charge all rate limits or none (core/rates.py: `decide`, restated).
-- KEYS: the key of each limit.  ARGV: the longest wait; then cost and tolerance of each, all in µs.
-- Returns {1, wait, the new time of each} or {0, wait}.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local wait, times = 0, {}
for i, key in ipairs(KEYS) do
  times[i] = math.max(tonumber(redis.call('GET', key) or 0), now) + ARGV[2 * i]
  wait = math.max(wait, times[i] - ARGV[2 * i + 1] - now)
end
if wait > tonumber(ARGV[1]) then return {0, wait} end
for i, key in ipairs(KEYS) do
  redis.call('SET', key, string.format('%.0f', times[i]), 'PX', math.ceil((times[i] - now) / 1000) + 1)
end
return {1, wait, unpack(times)}
