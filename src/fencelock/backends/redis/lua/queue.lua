-- The rule of admission (model.py: `admit` and `settle`), restated: who holds the name, and who is next.
--
-- holders  hash   id -> "ends:token:ttl:mode:owner"         whoever holds the name
-- queue    zset   id by number                              whoever waits, in order
-- waiters  hash   id -> "ends:ttl:mode:channel:owner"       the same, in full
-- gone     string                                           this claim was abandoned: its stragglers come too late
-- Times are in ms by this server's clock. mode: x (exclusive), s (shared), or a number (one of so many permits).
-- Every key of a name ends with the last claim on it; only the bucket's token stays.
local TOKEN, HOLDERS, QUEUE, WAITERS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

local function outlive(key, ends)
  if redis.call('PTTL', key) < ends - now then
    redis.call('PEXPIREAT', key, ends)
  end
end

-- Tokens rise even if all data is lost, as long as the clock does.
local function mint()
  local token = time[1] * 1000000 + time[2]
  local last = tonumber(redis.call('GET', TOKEN) or 0)
  if token <= last then token = last + 1 end
  token = string.format('%.0f', token)
  redis.call('SET', TOKEN, token)
  return token
end

local function hold(id, token, ttl, mode, owner)
  local ends = now + ttl + 1
  redis.call('HSET', HOLDERS, id, ends .. ':' .. token .. ':' .. ttl .. ':' .. mode .. ':' .. owner)
  outlive(HOLDERS, ends)
end

local function line_up(id, ttl, mode, channel, owner)
  local ends = now + ttl + 1
  redis.call('HSET', WAITERS, id, ends .. ':' .. ttl .. ':' .. mode .. ':' .. channel .. ':' .. owner)
  if not redis.call('ZSCORE', QUEUE, id) then
    local last = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2] or 0
    redis.call('ZADD', QUEUE, last + 1, id)
  end
  outlive(WAITERS, ends)
  outlive(QUEUE, ends)
end

local function leave_line(id)
  redis.call('ZREM', QUEUE, id)
  redis.call('HDEL', WAITERS, id)
end

-- A waiter whose connection is gone is passed over and keeps its place: if it was killed, nobody waits for its ttl.
-- A publication that is forbidden says nothing about who listens; that waiter looks by itself in the end.
local function listens(channel, message)
  local heard = redis.pcall('PUBLISH', channel, message)
  return type(heard) == 'table' or heard > 0
end

-- Drop the dead and hand the lock over, token and all. `me` is whoever asks: it need not be called.
-- Returns the token of `me` if it was admitted now, the first in line, and when the first of the holders runs out.
local function settle(me)
  local held, exclusive, soonest, token = 0, false, nil, nil
  local holders = redis.call('HGETALL', HOLDERS)
  for i = 1, #holders, 2 do
    local ends, mode = string.match(holders[i + 1], '^(%d+):%d+:%d+:([^:]*)')
    ends = tonumber(ends)
    if ends <= now then
      redis.call('HDEL', HOLDERS, holders[i])
    else
      held, exclusive = held + 1, mode == 'x'
      if not soonest or ends < soonest then soonest = ends end
    end
  end
  local place = 0
  while true do
    local id = redis.call('ZRANGE', QUEUE, place, place)[1]
    if not id then return token, nil, soonest end
    local ends, ttl, mode, channel, owner =
      string.match(redis.call('HGET', WAITERS, id) or '', '^(%d+):(%d+):([^:]*):([^:]*):(.*)$')
    if not ends or tonumber(ends) <= now then
      leave_line(id)
    elseif held > 0 and (mode == 'x' or exclusive or (mode ~= 's' and held >= tonumber(mode))) then
      return token, id, soonest
    else
      local minted = mint()
      if id == me or listens(channel, id .. ':' .. minted) then
        if id == me then token = minted end
        leave_line(id)
        hold(id, minted, ttl, mode, owner)
        held, exclusive = held + 1, mode == 'x'
      else
        place = place + 1
      end
    end
  end
end
