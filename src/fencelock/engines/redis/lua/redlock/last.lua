-- Read what this node knows of a name: `last`, the highest proposal accepted or undone, and `high` and `born`.
--
-- The proof rests on one fact: nothing ever lowers `last`. So the node deletes the entry of a name only in the step that raises
-- the floor above it; this does not depend on any clock. The floor stays one period behind, so that nodes do not refuse
-- clients whose clocks are a little behind.
local PERIOD, MANY = 60, 100000
local time = redis.call('TIME')
local known, since, high, floor, born =
  unpack(redis.call('HMGET', SEEN, NAME, '\0period', '\0high', '\0floor', '\0born'))
local period = math.floor(time[1] / PERIOD)
if not since then
  -- The node is new, or was wiped: only its clock can tell what it may have seen.
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

-- `proposal` is text: Lua would lose digits of a number of this size when it converts it.
local function raise(proposal)
  redis.call('HSET', SEEN, NAME, proposal, '\0high', tonumber(proposal) > tonumber(high) and proposal or high)
end
