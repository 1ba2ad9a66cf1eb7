-- Take the lock or a place in line, in one step that also mints the token; count anew what is there already.
-- KEYS: base.  ARGV: name, ttl, mode, owner, id, seat: "channel:round" (none: do not queue).
-- Returns the token; or less than 0 for whoever has to wait: -1, or -2 less the ms until it should look by itself; or a
-- string, the mode that others use the name in and that contradicts this one's.
local BASE, NAME, ttl, mode, owner, id, seat = KEYS[1], unpack(ARGV)
-- include queue.lua
local mine = token_of(id)
if mine then -- the answer to an earlier attempt was lost
  hold(id, mine, ttl, mode, owner)
  return tonumber(mine)
end
if redis.call('EXISTS', BASE .. ':gone:' .. id) == 1 then return -1 end
local queued = redis.call('HEXISTS', WAITERS, id) == 1
if mode ~= 'x' and not queued then
  for i = 2, #sharing, 2 do
    local ends, theirs = string.match(sharing[i], '^(%d+):%d+:%d+:([^:]*)')
    if theirs ~= mode and tonumber(ends) > now then return theirs end
  end
  for _, other in ipairs(redis.call('HVALS', WAITERS)) do
    local ends, theirs = string.match(other, '^(%d+):%d+:([^:]*)')
    if theirs ~= 'x' and theirs ~= mode and tonumber(ends) > now then return theirs end
  end
end
local function enqueue() line_up(id, ttl, mode, seat == '' and ':0' or seat, owner) end
if queued then enqueue() end -- a sign of life
local token, first = settle(id)
if not token and not queued and not first and fits(mode) then
  token = mint()
  hold(id, token, ttl, mode, owner)
end
if token then return tonumber(token) end
if seat == '' then
  leave_line(id) -- a wait that ends in one last try leaves nothing behind
  return -1
end
if not queued then enqueue() end
-- The first in line watches the holders, everybody else the one ahead: one death wakes one waiter.
local ends
local is_first = not exclusive and (not first or first == id)
local place = is_first and 0 or redis.call('LPOS', QUEUE, id, 'RANK', -1)
while place > 0 and not ends do
  local ahead = redis.call('LINDEX', QUEUE, place - 1)
  local theirs = tonumber(string.match(redis.call('HGET', WAITERS, ahead) or '', '^%d+'))
  if theirs and theirs > now then
    ends = theirs
  else
    -- It died. Whoever stayed behind it would look again and again, for as long as the lock is held.
    redis.call('HDEL', WAITERS, ahead)
    redis.call('LREM', QUEUE, 1, ahead)
    place = place - 1
  end
end
ends = ends or (exclusive and now + redis.call('PTTL', LOCK)) or soonest
return ends and math.min(now - ends, 0) - 2 or -1
