-- Take the lock or a place in line, in one step that also mints the token; count anew what is there already.
-- KEYS: token, holders, queue, waiters, gone.  ARGV: id, ttl, mode, owner, channel (none: do not queue).
-- Returns the token; or less than 0 for whoever has to wait: -1, or -2 less the ms until it should look by itself; or a
-- string, the mode that others use the name in and that contradicts this one's.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local id, ttl, mode, owner, channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if redis.call('EXISTS', KEYS[2], KEYS[3], KEYS[5]) == 0 then
  -- Nobody is there: what `settle` would do, in as few steps as possible.
  local token = time[1] * 1000000 + time[2]
  local last = tonumber(redis.call('GET', KEYS[1]) or 0)
  if token <= last then token = last + 1 end
  local minted = string.format('%.0f', token)
  redis.call('SET', KEYS[1], minted)
  redis.call('HSET', KEYS[2], id, now + ttl + 1 .. ':' .. minted .. ':' .. ttl .. ':' .. mode .. ':' .. owner)
  redis.call('PEXPIREAT', KEYS[2], now + ttl + 1)
  return token
end
-- include queue.lua
local mine = redis.call('HGET', HOLDERS, id)
if mine then
  local ends, token = string.match(mine, '^(%d+):(%d+)')
  if tonumber(ends) > now then
    hold(id, token, ttl, mode, owner)
    return tonumber(token)
  end
end
if redis.call('EXISTS', KEYS[5]) == 1 then return -1 end
local known = redis.call('HEXISTS', WAITERS, id) == 1
if not known and mode ~= 'x' then
  for _, other in ipairs(redis.call('HVALS', HOLDERS)) do
    local ends, theirs = string.match(other, '^(%d+):%d+:%d+:([^:]*)')
    if theirs ~= 'x' and theirs ~= mode and tonumber(ends) > now then return theirs end
  end
  for _, other in ipairs(redis.call('HVALS', WAITERS)) do
    local ends, theirs = string.match(other, '^(%d+):%d+:([^:]*)')
    if theirs ~= 'x' and theirs ~= mode and tonumber(ends) > now then return theirs end
  end
end
line_up(id, ttl, mode, channel, owner)
local token, first, soonest = settle(id)
if token then return tonumber(token) end
if channel == '' then
  leave_line(id)
else
  -- The first in line watches the holders, everybody else the one ahead: one death wakes one waiter.
  local ends = soonest
  if first ~= id then
    local place = redis.call('ZRANK', QUEUE, id)
    local ahead = redis.call('ZRANGE', QUEUE, place - 1, place - 1)[1]
    ends = tonumber(string.match(redis.call('HGET', WAITERS, ahead) or '', '^%d+'))
  end
  if ends then return now - ends - 2 end
end
return -1
