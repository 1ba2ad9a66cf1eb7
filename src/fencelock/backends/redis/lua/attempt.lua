-- Take the lock or a place in line, in one step that also mints the token; count anew what is there already.
-- KEYS: base.  ARGV: name, ttl, mode, owner, id, seat: "channel:round" (none: do not queue).
-- Returns the token; or less than 0 for whoever has to wait: -1, or -2 less the ms until it should look by itself; or a
-- string, the mode that others use the name in and that contradicts this one's.
local BASE, NAME, ttl, mode, owner, id, seat = KEYS[1], unpack(ARGV)
-- include queue.lua
local held = token_of(id)
if held then -- the answer to an earlier attempt was lost
  hold(id, held, ttl, mode, owner)
  return tonumber(held)
end
if redis.call('EXISTS', BASE .. ':gone:' .. id) == 1 then return -1 end
if mode ~= 'x' and redis.call('HEXISTS', WAITERS, id) == 0 then
  for _, other in ipairs(redis.call('HVALS', HOLDERS)) do
    local ends, theirs = string.match(other, '^(%d+):%d+:%d+:([^:]*)')
    if theirs ~= mode and tonumber(ends) > now then return theirs end
  end
  for _, other in ipairs(redis.call('HVALS', WAITERS)) do
    local ends, theirs = string.match(other, '^(%d+):%d+:([^:]*)')
    if theirs ~= 'x' and theirs ~= mode and tonumber(ends) > now then return theirs end
  end
end
if seat == '' and redis.call('EXISTS', LOCK) == 1 then
  leave_line(id) -- a wait that ends in one last try leaves nothing behind
  return -1
end
line_up(id, ttl, mode, seat == '' and ':0' or seat, owner)
local token, first, soonest = settle(id)
if token then return tonumber(token) end
if seat == '' then
  leave_line(id)
  return -1
end
-- The first in line watches the holders, everybody else the one ahead: one death wakes one waiter.
local ends = soonest
if first ~= id then
  local last = redis.call('LINDEX', QUEUE, -1) == id
  local place = last and -1 or redis.call('LPOS', QUEUE, id)
  while place ~= 0 do
    local ahead = redis.call('LINDEX', QUEUE, place - 1)
    if not ahead then break end
    local theirs = tonumber(string.match(redis.call('HGET', WAITERS, ahead) or '', '^%d+'))
    if theirs and theirs > now then
      ends = theirs
      break
    end
    -- It died. Whoever stayed behind it would look again and again, for as long as the lock is held.
    redis.call('HDEL', WAITERS, ahead)
    redis.call('LREM', QUEUE, 1, ahead)
    if not last then place = place - 1 end
  end
end
return ends and math.min(now - ends, 0) - 2 or -1
