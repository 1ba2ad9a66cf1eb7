-- Read only. Returns {id, proposal, ms left, label} of this node's holder, or {}; and {id, ticket, ms left, label} of each
-- waiter.
-- KEYS: base.  ARGV: name.
-- include redlock/node.lua
-- include redlock/queue.lua
local holder, waiters = {}, {}
local id, proposal, label = string.match(redis.call('GET', LOCK) or '', '^([^:]*):(%d+):(.*)$')
if id then holder = {id, proposal, redis.call('PTTL', LOCK), label} end
local queue = redis.call('ZRANGE', QUEUE, 0, -1, 'WITHSCORES')
for i = 1, #queue, 2 do
  local ends, channel, waiter_label = string.match(redis.call('HGET', WAITERS, queue[i]) or '', '^(%d+):([^:]*):(.*)$')
  -- A waiter that is no longer subscribed was killed.
  if ends and tonumber(ends) > now and redis.call('PUBSUB', 'NUMSUB', channel)[2] > 0 then
    waiters[#waiters + 1] = {queue[i], queue[i + 1], ends - now, waiter_label}
  end
end
return {holder, waiters}
