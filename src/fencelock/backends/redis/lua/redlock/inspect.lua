-- Look, and change nothing. Returns {id, proposal, ms left, owner} of whoever has this node, or nothing; and
-- {id, ticket, ms left, owner} of each who waits.
-- KEYS: lock, queue, waiters.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local holder, waiters = {}, {}
local id, proposal, owner = string.match(redis.call('GET', KEYS[1]) or '', '^([^:]*):(%d+):(.*)$')
if id then holder = {id, proposal, redis.call('PTTL', KEYS[1]), owner} end
local queue = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
for i = 1, #queue, 2 do
  local ends, channel, who = string.match(redis.call('HGET', KEYS[3], queue[i]) or '', '^(%d+):([^:]*):(.*)$')
  -- Whoever does not listen any more has not left in order.
  if ends and tonumber(ends) > now and redis.call('PUBSUB', 'NUMSUB', channel)[2] > 0 then
    waiters[#waiters + 1] = {queue[i], queue[i + 1], ends - now, who}
  end
end
return {holder, waiters}
