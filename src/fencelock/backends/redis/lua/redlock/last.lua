-- One node of the fenced Redlock. What it keeps:
--
-- lock     string  "id:proposal:owner"           the attempt that has this node, for its ttl
-- seen     hash    name -> the highest proposal  accepted or undone here, in this period; and under names that no lock can
--                  have: \0period, \0high and \0before (the highest of this and the last period), \0floor (all that was
--                  forgotten lies at or below it) and \0born (the clock when this node was new, or was wiped)
-- before   hash    the same, of the period before
-- queue    zset    id by ticket                  who would like to be told when the lock comes free; a hint, no more
-- waiters  hash    id -> "ends:channel:owner"
--
-- The proof rests on one thing: nothing ever lowers what `last` answers. So what is known of a name is only forgotten
-- (`turn`) in the same step that raises the floor over it, and no clock can make that go wrong.
local LOCK, SEEN, BEFORE, QUEUE, WAITERS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local PERIOD, MANY = 60, 100000
local HIGH = '\0high'

-- Read what is known of a name, in this order: its own, period, high, before, floor, born. The floor follows a period
-- behind, so that clients whose clocks are not alike do not reject each other.
local function turn(name)
  local state = redis.call('HMGET', SEEN, name, '\0period', HIGH, '\0before', '\0floor', '\0born')
  local period = math.floor(time[1] / PERIOD)
  if not state[2] then
    -- If it was wiped, the clock is all that is left to go by.
    state = {false, period, '0', '0', '0', time[1] .. string.format('%06d', time[2])}
    redis.call('HSET', SEEN, '\0period', period, HIGH, 0, '\0before', 0, '\0floor', 0, '\0born', state[6])
  elseif period > tonumber(state[2]) or (time[2] % 64 == 0 and redis.call('HLEN', SEEN) > MANY) then
    if tonumber(state[4]) > tonumber(state[5]) then state[5] = state[4] end
    redis.call('UNLINK', BEFORE)
    redis.call('RENAME', SEEN, BEFORE)
    state = {false, math.max(period, state[2]), '0', state[3], state[5], state[6]}
    redis.call('HSET', SEEN, '\0period', state[2], HIGH, 0, '\0before', state[4], '\0floor', state[5], '\0born', state[6])
  end
  return state
end

local function last(name, state)
  return tonumber(state[1] or redis.call('HGET', BEFORE, name) or state[5])
end

-- `proposal` as text: numbers of this size lose digits on their way through Lua.
local function raise(name, proposal, state)
  local high = state[3]
  if tonumber(proposal) > tonumber(high) then high = proposal end
  redis.call('HSET', SEEN, name, proposal, HIGH, high)
end

local function take(id, proposal, ttl, owner)
  redis.call('SET', LOCK, id .. ':' .. proposal .. ':' .. owner, 'PX', ttl + 1)
end

local function leave_line(id)
  if redis.call('HDEL', WAITERS, id) == 1 then redis.call('ZREM', QUEUE, id) end
end

local function line_up(id, ttl, owner, channel, ticket)
  local ends = now + ttl + 1
  redis.call('HSET', WAITERS, id, ends .. ':' .. channel .. ':' .. owner)
  redis.call('ZADD', QUEUE, 'NX', ticket, id)
  if redis.call('PTTL', WAITERS) < ends - now then
    redis.call('PEXPIREAT', WAITERS, ends)
    redis.call('PEXPIREAT', QUEUE, ends)
  end
end

-- Tell one waiter, on all nodes the same one: the ticket decides. It stays in line until it has the lock.
local function call_next()
  while true do
    local id = redis.call('ZRANGE', QUEUE, 0, 0)[1]
    if not id then return end
    local ends, channel = string.match(redis.call('HGET', WAITERS, id) or '', '^(%d+):([^:]*)')
    if ends and tonumber(ends) > now then
      local heard = redis.pcall('PUBLISH', channel, id .. ':0:0')
      if type(heard) == 'table' or heard > 0 then return end
    end
    redis.call('HDEL', WAITERS, id)
    redis.call('ZREM', QUEUE, id)
  end
end
