-- The admission rule (model.py: `blockers` and `advance_queue`), restated: who holds the name, and who is next.
-- Include name.lua and grant.lua before.

-- The holders that share the name, {id, text, id, text, …}.
local sharing = exclusive and {} or redis.call('HGETALL', HOLDERS)
local held, first_expiry -- the number of shared holders, and when the first of them expires: advance_queue sets both

-- Return the token of a claim that holds the name.
local function token_of(id)
  if exclusive then return holds_exclusively(id) and string.match(exclusive, '^[^:]*:(%d+)') or nil end
  for i = 1, #sharing, 2 do
    if sharing[i] == id then
      local ends, token = string.match(sharing[i + 1], '^(%d+):(%d+)')
      return tonumber(ends) > now and token or nil
    end
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

-- Add a claim to the queue, or restart its ttl there. Returns how many waiters are ahead of it.
local function enqueue(id, ttl, mode, notify_target, label)
  local entry = now + ttl .. ':' .. ttl .. ':' .. mode .. ':' .. notify_target .. ':' .. label
  local is_new = redis.call('HSET', WAITERS, id, entry) == 1
  local ahead = not is_new and redis.call('LPOS', QUEUE, id) or redis.call('RPUSH', QUEUE, id) - 1
  if redis.call('PTTL', WAITERS) <= tonumber(ttl) then
    -- Twice as long as needed, so that most attempts can skip this.
    redis.call('PEXPIRE', WAITERS, ttl * 2)
    redis.call('PEXPIRE', QUEUE, ttl * 2)
  end
  return ahead
end

local function dequeue(id)
  if redis.call('HDEL', WAITERS, id) == 1 then redis.call('LREM', QUEUE, 1, id) end
end

-- Return two values: whether a waiter may be granted the lock, because its connection is subscribed, and whether to notify it. A
-- waiter without a connection is skipped and keeps its place: the others need not wait for the ttl of a waiter that was killed.
-- The result of PUBLISH would not do: Redis publishes to replicas too, so a waiter connected to a former master would take the
-- lock for its own; and it counts pattern subscribers. Without permission for PUBSUB, the waiter is granted the lock without a
-- notification, and learns of it when it attempts again.
local function may_grant(channel)
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
      first_expiry = math.min(first_expiry or ends, ends)
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
      local grant, notify = true, false
      if id ~= me then grant, notify = may_grant(channel) end
      if grant then
        local minted = mint()
        if id == me then token = minted end
        if notify then redis.pcall('PUBLISH', channel, id .. ':' .. minted .. ':' .. attempt_no) end
        dequeue(id)
        hold(id, minted, ttl, mode, label)
        held = held + 1
        first_expiry = math.min(first_expiry or now + ttl, now + ttl)
      else
        place = place + 1
      end
    end
  end
  return token, nil
end
