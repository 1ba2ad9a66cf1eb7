-- Read what this node knows of a name: `last`, the highest proposal accepted or undone, and `high` and `born`.
--
-- The proof rests on one thing: nothing ever lowers `last`. So what is known of a name is only forgotten in the same step
-- that raises the floor over it, and no clock can make that go wrong. The floor follows a period behind, so that clients
-- whose clocks are not alike do not reject each other.
local PERIOD, MANY = 60, 100000
local time = redis.call('TIME')
local known, since, high, floor, born =
  unpack(redis.call('HMGET', SEEN, NAME, '\0period', '\0high', '\0floor', '\0born'))
local period = math.floor(time[1] / PERIOD)
if not since then
  -- If it was wiped, the clock is all that is left to go by.
  high, floor, born = '0', '0', time[1] .. string.format('%06d', time[2])
  redis.call('HSET', SEEN, '\0period', period, '\0high', 0, '\0before', 0, '\0floor', 0, '\0born', born)
elseif period > tonumber(since) or (time[2] % 64 == 0 and redis.call('HLEN', SEEN) > MANY) then
  local before = redis.call('HGET', SEEN, '\0before')
  if tonumber(before) > tonumber(floor) then floor = before end
  redis.call('UNLINK', BASE .. ':before')
  redis.call('RENAME', SEEN, BASE .. ':before')
  period = math.max(period, since)
  redis.call('HSET', SEEN, '\0period', period, '\0high', 0, '\0before', high, '\0floor', floor, '\0born', born)
  high = '0'
end
local last = tonumber(known or redis.call('HGET', BASE .. ':before', NAME) or floor)

-- `proposal` as text: numbers of this size lose digits on their way through Lua.
local function raise(proposal)
  redis.call('HSET', SEEN, NAME, proposal, '\0high', tonumber(proposal) > tonumber(high) and proposal or high)
end
