local QUEUE, WAITERS = BASE .. ':queue:' .. NAME, BASE .. ':waiters:' .. NAME
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function leave_line(id)
  redis.call('HDEL', WAITERS, id)
  redis.call('ZREM', QUEUE, id)
end

local function line_up(id, ttl, owner, channel, ticket)
  local ends = now + ttl
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
      -- Asked, as those who listen to everything would count.
      local there = redis.pcall('PUBSUB', 'NUMSUB', channel)
      if there.err or there[2] > 0 then
        redis.pcall('PUBLISH', channel, id .. ':0:0')
        return
      end
    end
    leave_line(id)
  end
end
