-- The rule of admission (model.py: `admit` and `settle`), restated: who holds the name, and who is next.
--
-- base            string  the bucket's last token: all that stays of a name when nobody is there
-- base:lock:N     string  "id:token:ttl:owner"                 whoever holds N exclusively, for its ttl
-- base:holders:N  hash    id -> "ends:token:ttl:mode:owner"    whoever shares it
-- base:queue:N    list    ids                                  whoever waits, in order
-- base:waiters:N  hash    id -> "ends:ttl:mode:channel:round:owner"  the same, in full; a call names the round, so that
--                         one for an earlier place in line, which has run out since, is not taken for one for this
-- base:gone:ID    string  this claim was abandoned: its stragglers come too late
-- Times are in ms by this server's clock; a ttl is one more than what its client counts on. mode: x (exclusive), s (shared), or a number
-- (one of so many permits). All keys of a name share the hash tag in `base`.
local LOCK, HOLDERS = BASE .. ':lock:' .. NAME, BASE .. ':holders:' .. NAME
local QUEUE, WAITERS = BASE .. ':queue:' .. NAME, BASE .. ':waiters:' .. NAME

-- include mint.lua
local now = tonumber(string.sub(clock, 1, -4))

-- Who holds the name: one claim alone, or some that share it, {id, text, id, text, …}.
local exclusive = redis.call('GET', LOCK)
local sharing = exclusive and {} or redis.call('HGETALL', HOLDERS)
local held, soonest -- how many share it, and when the first of them runs out: known after `settle`

-- Return the token of a claim that holds the name.
local function token_of(id)
  if exclusive then return string.sub(exclusive, 1, #id) == id and string.match(exclusive, '^[^:]*:(%d+)') or nil end
  for i = 1, #sharing, 2 do
    if sharing[i] == id then
      local ends, token = string.match(sharing[i + 1], '^(%d+):(%d+)')
      return tonumber(ends) > now and token or nil
    end
  end
end

local function hold(id, token, ttl, mode, owner)
  if mode == 'x' then
    exclusive = id .. ':' .. token .. ':' .. ttl .. ':' .. owner
    redis.call('SET', LOCK, exclusive, 'PX', ttl)
  else
    redis.call('HSET', HOLDERS, id, now + ttl .. ':' .. token .. ':' .. ttl .. ':' .. mode .. ':' .. owner)
    if redis.call('PTTL', HOLDERS) < tonumber(ttl) then redis.call('PEXPIRE', HOLDERS, ttl) end
  end
end

-- End a claim's hold. Returns whether it held the name until now. Deleting is the first write of a script that releases: a server
-- that is out of memory allows that, and then whatever else the same script writes.
local function drop(id)
  local ours = token_of(id) ~= nil
  if not exclusive then
    redis.call('HDEL', HOLDERS, id)
    sharing = redis.call('HGETALL', HOLDERS)
  elseif ours then
    redis.call('DEL', LOCK)
    exclusive = false
  end
  return ours
end

-- Take a place in line, or show a sign of life there.
local function line_up(id, ttl, mode, seat, owner)
  if redis.call('HSET', WAITERS, id, now + ttl .. ':' .. ttl .. ':' .. mode .. ':' .. seat .. ':' .. owner) == 1 then
    redis.call('RPUSH', QUEUE, id)
  end
  if redis.call('PTTL', WAITERS) <= tonumber(ttl) then
    -- Twice as long as needed, so that this is seldom.
    redis.call('PEXPIRE', WAITERS, ttl * 2)
    redis.call('PEXPIRE', QUEUE, ttl * 2)
  end
end

local function leave_line(id)
  if redis.call('HDEL', WAITERS, id) == 1 then redis.call('LREM', QUEUE, 1, id) end
end

-- A waiter whose connection is gone is passed over and keeps its place: if it was killed, nobody waits for its ttl. Asked before
-- it is called, and not by calling: what is published goes to the replicas too, whoever hears it here. A waiter on a master that
-- was replaced a moment ago, and is a replica now, would take it for its turn. Nor do those count who listen to everything.
-- A question that is forbidden says nothing about who listens; that waiter looks by itself in the end.
local function listens(channel)
  local there = redis.pcall('PUBSUB', 'NUMSUB', channel)
  return there.err or there[2] > 0, not there.err
end

-- The rule itself: whether a claim of this mode may hold the name beside those who do. Call `settle` before.
local function fits(mode)
  return not exclusive and (held == 0 or mode == 's' or (mode ~= 'x' and held < tonumber(mode)))
end

-- Drop the dead and hand the lock over, token and all, to those who are next. `me` is whoever asks: it need not be called.
-- Returns the token of `me` if it was admitted now, and the first who has to wait for those who share the name.
local function settle(me)
  local token
  held = 0
  for i = 1, #sharing, 2 do
    local ends = tonumber(string.match(sharing[i + 1], '^%d+'))
    if ends <= now then
      redis.call('HDEL', HOLDERS, sharing[i])
    else
      held = held + 1
      soonest = math.min(soonest or ends, ends)
    end
  end
  local place = 0
  while not exclusive do
    local id = redis.call('LINDEX', QUEUE, place)
    if not id then return token, nil end
    local ends, ttl, mode, channel, round, owner =
      string.match(redis.call('HGET', WAITERS, id) or '', '^(%d+):(%d+):([^:]*):([^:]*):(%d+):(.*)$')
    if not ends or tonumber(ends) <= now then
      redis.call('HDEL', WAITERS, id)
      redis.call('LREM', QUEUE, 1, id)
    elseif not fits(mode) then
      return token, id
    else
      local there, known = true, false
      if id ~= me then there, known = listens(channel) end
      if there then
        local minted = mint()
        if id == me then token = minted end
        if known then redis.pcall('PUBLISH', channel, id .. ':' .. minted .. ':' .. round) end
        leave_line(id)
        hold(id, minted, ttl, mode, owner)
        held = held + 1
        soonest = math.min(soonest or now + ttl, now + ttl)
      else
        place = place + 1
      end
    end
  end
  return token, nil
end
