-- Read `last`, the highest proposal for this name that this node accepted or undid; and `created`, below which a new node
-- accepts nothing.
--
-- The proof rests on one fact: nothing ever lowers `last`. So the node deletes the entry of a name only in the step that
-- raises the floor to it; this does not depend on any clock. The floor stays one period behind, so that nodes do not refuse
-- clients whose clocks are a little behind.
local PERIOD_SECONDS, MANY_NAMES = 60, 100000
local time = redis.call('TIME')
local entry, stored_period, period_max, floor, created =
  unpack(redis.call('HMGET', SEEN, NAME, '\0period', '\0high', '\0floor', '\0born'))
local period = math.floor(time[1] / PERIOD_SECONDS)
if not stored_period then
  -- The node is new, or was wiped: only its clock can tell what it may have seen.
  period_max, floor, created = '0', '0', time[1] .. string.format('%06d', time[2])
  redis.call('HSET', SEEN, '\0period', period, '\0high', 0, '\0before', 0, '\0floor', 0, '\0born', created)
elseif period > tonumber(stored_period) or (time[2] % 64 == 0 and redis.call('HLEN', SEEN) > MANY_NAMES) then
  -- A new period: the entries of the last one move to `before`, and those that were there are deleted.
  local deleted_max = redis.call('HGET', SEEN, '\0before')
  if tonumber(deleted_max) > tonumber(floor) then floor = deleted_max end
  redis.call('UNLINK', BASE .. ':before')
  redis.call('RENAME', SEEN, BASE .. ':before')
  period = math.max(period, stored_period)
  redis.call('HSET', SEEN, '\0period', period, '\0high', 0, '\0before', period_max, '\0floor', floor, '\0born', created)
  period_max = '0'
end
local last = tonumber(entry or redis.call('HGET', BASE .. ':before', NAME) or floor)

-- `proposal` is text: Lua would lose digits of a number of this size when it converts it.
local function set_last(proposal)
  redis.call('HSET', SEEN, NAME, proposal, '\0high', tonumber(proposal) > tonumber(period_max) and proposal or period_max)
end
