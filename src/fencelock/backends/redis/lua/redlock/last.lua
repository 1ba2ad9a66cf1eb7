-- One node of the fenced Redlock. What it keeps:
--
-- lock     string  "id:proposal:owner"             the attempt that has this node, for its ttl
-- seen     hash    name -> the highest proposal    accepted or undone here, in this period
-- before   hash    the same, of the period before
-- floor    hash    period, high, before, floor     everything that was collected lies at or below the floor; `born` is
--                                                  the clock when this node was new, or was wiped
-- queue    zset    id by ticket                    who would like to be told when the lock comes free; a hint, no more
-- waiters  hash    id -> "ends:channel:owner"
--
-- The proof rests on one thing: nothing ever lowers what `last` answers. So what is known of a name is only forgotten
-- (`turn`) in the same step that raises the floor over it, and no clock can make that go wrong.
local LOCK, SEEN, BEFORE, FLOOR, QUEUE, WAITERS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local PERIOD, MANY = 60, 100000

-- The floor follows a period behind, so that clients whose clocks are not alike do not reject each other.
local function turn()
  local state = redis.call('HMGET', FLOOR, 'period', 'high', 'before', 'floor')
  local period = math.floor(time[1] / PERIOD)
  if not state[1] then
    -- If it was wiped, the clock is all that is left to go by.
    local born = time[1] .. string.format('%06d', time[2])
    redis.call('HSET', FLOOR, 'period', period, 'high', 0, 'before', 0, 'floor', 0, 'born', born)
  elseif period > tonumber(state[1]) or redis.call('HLEN', SEEN) > MANY then
    local floor = state[4]
    if tonumber(state[3]) > tonumber(floor) then floor = state[3] end
    redis.call('UNLINK', BEFORE)
    if redis.call('EXISTS', SEEN) == 1 then redis.call('RENAME', SEEN, BEFORE) end
    redis.call('HSET', FLOOR, 'period', math.max(period, state[1]), 'high', 0, 'before', state[2], 'floor', floor)
  end
end

local function last(name)
  local known = redis.call('HGET', SEEN, name) or redis.call('HGET', BEFORE, name) or redis.call('HGET', FLOOR, 'floor')
  return tonumber(known or 0)
end

-- `proposal` as text: numbers of this size lose digits on their way through Lua.
local function raise(name, proposal)
  redis.call('HSET', SEEN, name, proposal)
  if tonumber(redis.call('HGET', FLOOR, 'high')) < tonumber(proposal) then
    redis.call('HSET', FLOOR, 'high', proposal)
  end
end

local function take(id, proposal, ttl, owner)
  redis.call('SET', LOCK, id .. ':' .. proposal .. ':' .. owner, 'PX', ttl + 1)
end

local function leave_line(id)
  redis.call('ZREM', QUEUE, id)
  redis.call('HDEL', WAITERS, id)
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
    leave_line(id)
  end
end
