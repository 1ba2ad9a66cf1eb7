-- Take the lock or a place in line, in one step that also mints the token; count anew what is there already.
-- KEYS: base.  ARGV: name, ttl, mode, owner, id, seat: "channel:round" (none: do not queue), and anything if nobody reads what
-- this returns: then whoever asks is called, if the lock is had at once.
-- Returns the token; or less than 0 for whoever has to wait: -1, or -2 less the ms until it should look by itself; or a
-- string, the mode that others use the name in and that contradicts this one's.
local BASE, NAME, ttl, mode, owner, id, seat, unread = KEYS[1], unpack(ARGV)
local lock, queue, gone = BASE .. ':lock:' .. NAME, BASE .. ':queue:' .. NAME, BASE .. ':gone:' .. id
local time = redis.call('TIME')
local clock = time[1] .. string.sub('00000' .. time[2], -6)

local function granted(token)
  if unread then
    local mine, round = string.match(seat, '^(.*):(%d+)$')
    redis.pcall('PUBLISH', mine, id .. ':' .. token .. ':' .. round)
  end
  return tonumber(token)
end

-- Whoever asks in silence expects a holder. Everybody else has one look for all: what is named four times counts for more
-- than the three others together.
local holder = unread and redis.call('GET', lock)
local there = holder and 4 * redis.call('EXISTS', gone)
  or redis.call('EXISTS', lock, queue, BASE .. ':holders:' .. NAME, gone, gone, gone, gone)
if mode == 'x' and there == 0 and not holder then
  -- Nobody is there: what `settle` would do, in as few steps as possible.
  local token = clock
  local last = redis.call('SET', BASE, token, 'GET')
  if last and (#last > #token or (#last == #token and last >= token)) then
    token = string.format('%.0f', last + 1)
    redis.call('SET', BASE, token)
  end
  redis.call('SET', lock, id .. ':' .. token .. ':' .. ttl .. ':' .. owner, 'PX', ttl)
  return granted(token)
end
local now = tonumber(string.sub(clock, 1, -4))
holder = holder or redis.call('GET', lock)
local ours = holder and string.sub(holder, 1, #id) == id
if holder and not ours and mode == 'x' and seat ~= '' and there < 4 then
  -- Somebody has it: whoever is new goes to the end of the line, and there is nothing to settle.
  local waiters = BASE .. ':waiters:' .. NAME
  -- As a whole number: what `..` does to numbers takes longer.
  local me = string.format('%d', now + ttl) .. ':' .. ttl .. ':x:' .. seat .. ':' .. owner
  if redis.call('HSET', waiters, id, me) == 1 then
    local place = redis.call('RPUSH', queue, id)
    if redis.call('PTTL', waiters) <= tonumber(ttl) then
      redis.call('PEXPIRE', waiters, ttl * 2)
      redis.call('PEXPIRE', queue, ttl * 2)
    end
    if unread then return 0 end
    if place == 1 then return -2 - math.max(0, redis.call('PTTL', lock)) end
    local ahead = redis.call('HGET', waiters, redis.call('LINDEX', queue, -2))
    return math.min(now - tonumber(string.match(ahead or '0', '^%d+')), 0) - 2
  end
end
-- include queue.lua
local held = ours and string.match(holder, '^[^:]*:(%d+)')
if not holder then
  local ends, token = string.match(redis.call('HGET', HOLDERS, id) or '', '^(%d+):(%d+)')
  if ends and tonumber(ends) > now then held = token end
end
if held then
  hold(id, held, ttl, mode, owner)
  return granted(held)
end
if there >= 4 then return -1 end
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
if holder and seat == '' then
  leave_line(id) -- a wait that ends in one last try leaves nothing behind
  return -1
end
line_up(id, ttl, mode, seat == '' and ':0' or seat, owner)
local token, first, soonest = settle(id)
if token then return granted(token) end
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
