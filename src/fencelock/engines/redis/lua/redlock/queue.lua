-- The queue of a name on this node. It only serves notifications: the lock itself is granted by proposals.
local QUEUE, WAITERS = BASE .. ':queue:' .. NAME, BASE .. ':waiters:' .. NAME
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function dequeue(id)
  redis.call('HDEL', WAITERS, id)
  redis.call('ZREM', QUEUE, id)
end

local function enqueue(id, ttl, label, channel, ticket)
  local ends = now + ttl
  redis.call('HSET', WAITERS, id, ends .. ':' .. channel .. ':' .. label)
  redis.call('ZADD', QUEUE, 'NX', ticket, id)
  if redis.call('PTTL', WAITERS) < ends - now then
    redis.call('PEXPIREAT', WAITERS, ends)
    redis.call('PEXPIREAT', QUEUE, ends)
  end
end

-- Notify the first waiter, which is the same on all nodes, as they order by ticket. It stays queued until it holds the lock.
local function notify_next()
  while true do
    local id = redis.call('ZRANGE', QUEUE, 0, 0)[1]
    if not id then return end
    local ends, channel = string.match(redis.call('HGET', WAITERS, id) or '', '^(%d+):([^:]*)')
    if ends and tonumber(ends) > now then
      -- Not by the result of PUBLISH: that counts pattern subscribers, too.
      local reply = redis.pcall('PUBSUB', 'NUMSUB', channel)
      if reply.err or reply[2] > 0 then
        redis.pcall('PUBLISH', channel, id .. ':0:0')
        return
      end
    end
    dequeue(id)
  end
end
