-- Look, and change nothing. Returns the holders and the waiters that are alive: {ms left, token, mode, owner} of each
-- holder, {ms left, mode, owner} of each waiter, in order.
-- KEYS: holders, queue, waiters.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local holders, waiters = {}, {}
for _, holder in ipairs(redis.call('HVALS', KEYS[1])) do
  local ends, token, mode, owner = string.match(holder, '^(%d+):(%d+):%d+:([^:]*):(.*)$')
  if tonumber(ends) > now then holders[#holders + 1] = {ends - now, tonumber(token), mode, owner} end
end
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local ends, mode, owner = string.match(redis.call('HGET', KEYS[3], id) or '', '^(%d+):%d+:([^:]*):[^:]*:(.*)$')
  if ends and tonumber(ends) > now then waiters[#waiters + 1] = {ends - now, mode, owner} end
end
return {holders, waiters}
