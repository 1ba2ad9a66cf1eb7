-- The admission rule (model.py: `admit` and `advance_queue`), restated: who holds the name, and who is next.
--
-- base            string  the last token of the bucket; the only key that outlives a name's holders and waiters
-- base:lock:N     string  "id:token:ttl:label"               the exclusive holder of N; the key expires with its ttl
-- base:holders:N  hash    id -> "ends:token:ttl:mode:label"  the shared holders
-- base:queue:N    list    ids of the waiters, in order
-- base:waiters:N  hash    id -> "ends:ttl:mode:channel:attempt_no:label"  the waiters; a notification repeats the attempt_no,
--                         so that the client ignores one for an earlier queue entry, which has expired since
-- base:gone:ID    string  this claim was abandoned: an attempt of it that arrives later is refused
-- A label is the owner, a newline, and the value that an election stores. Times are ms on this server's clock. A ttl is 1 ms longer than the client's. mode: x (exclusive), s (shared), or a number
-- (one of so many permits). All keys of a name share the hash tag in `base`.
local LOCK, HOLDERS = BASE .. ':lock:' .. NAME, BASE .. ':holders:' .. NAME
local QUEUE, WAITERS = BASE .. ':queue:' .. NAME, BASE .. ':waiters:' .. NAME

-- include mint.lua
local now = tonumber(string.sub(clock, 1, -4))

-- The holders: an exclusive one, or those that share the name, {id, text, id, text, …}.
local exclusive = redis.call('GET', LOCK)
local sharing = exclusive and {} or redis.call('HGETALL', HOLDERS)
local held, soonest -- the number of shared holders, and when the first of them expires; set by advance_queue

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

local function hold(id, token, ttl, mode, label)
  if mode == 'x' then
    exclusive = id .. ':' .. token .. ':' .. ttl .. ':' .. label
    redis.call('SET', LOCK, exclusive, 'PX', ttl)
  else
    redis.call('HSET', HOLDERS, id, now + ttl .. ':' .. token .. ':' .. ttl .. ':' .. mode .. ':' .. label)
    if redis.call('PTTL', HOLDERS) < tonumber(ttl) then redis.call('PEXPIRE', HOLDERS, ttl) end
  end
end

-- Remove a claim from the holders. Returns whether it held the name until now. DEL has to be the first write of a script: a
-- server that is out of memory allows it, and then also the later writes of the same script.
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

-- Add a claim to the queue, or restart its ttl there.
local function enqueue(id, ttl, mode, address, label)
  if redis.call('HSET', WAITERS, id, now + ttl .. ':' .. ttl .. ':' .. mode .. ':' .. address .. ':' .. label) == 1 then
    redis.call('RPUSH', QUEUE, id)
  end
  if redis.call('PTTL', WAITERS) <= tonumber(ttl) then
    -- Twice as long as needed, so that most attempts can skip this.
    redis.call('PEXPIRE', WAITERS, ttl * 2)
    redis.call('PEXPIRE', QUEUE, ttl * 2)
  end
end

local function dequeue(id)
  if redis.call('HDEL', WAITERS, id) == 1 then redis.call('LREM', QUEUE, 1, id) end
end

-- Return whether a waiter's connection is subscribed, and whether this server may answer that. A waiter without a connection is
-- skipped and keeps its place: the others need not wait for the ttl of a waiter that was killed. The result of PUBLISH would not
-- do: Redis publishes to replicas too, so a waiter connected to a former master would take the lock for its own; and it counts
-- pattern subscribers. Without permission for PUBSUB, the waiter is taken for connected and attempts again by itself.
local function is_subscribed(channel)
  local reply = redis.pcall('PUBSUB', 'NUMSUB', channel)
  return reply.err or reply[2] > 0, not reply.err
end

-- The rule itself: whether a claim of this mode may hold the name beside the current holders. Call advance_queue before.
local function fits(mode)
  return not exclusive and (held == 0 or mode == 's' or (mode ~= 'x' and held < tonumber(mode)))
end

-- Remove expired holders and waiters, and grant the lock to the next waiters: mint their tokens and notify them. `me` is the claim
-- that attempts: it gets its token with the reply. Returns the token of `me` if it was granted now, and the id of the first
-- waiter that the shared holders keep waiting.
local function advance_queue(me)
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
    local ends, ttl, mode, channel, attempt_no, label =
      string.match(redis.call('HGET', WAITERS, id) or '', '^(%d+):(%d+):([^:]*):([^:]*):(%d+):(.*)$')
    if not ends or tonumber(ends) <= now then
      redis.call('HDEL', WAITERS, id)
      redis.call('LREM', QUEUE, 1, id)
    elseif not fits(mode) then
      return token, id
    else
      local subscribed, notify = true, false
      if id ~= me then subscribed, notify = is_subscribed(channel) end
      if subscribed then
        local minted = mint()
        if id == me then token = minted end
        if notify then redis.pcall('PUBLISH', channel, id .. ':' .. minted .. ':' .. attempt_no) end
        dequeue(id)
        hold(id, minted, ttl, mode, label)
        held = held + 1
        soonest = math.min(soonest or now + ttl, now + ttl)
      else
        place = place + 1
      end
    end
  end
  return token, nil
end
