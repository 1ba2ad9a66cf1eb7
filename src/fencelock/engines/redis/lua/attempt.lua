-- Acquire the lock or enqueue the claim, in one step that also mints the token. An attempt of a claim that already holds the
-- lock or waits restarts its ttl.
-- KEYS: base.  ARGV: name, ttl, mode, label, id, notify_target: "channel:attempt_no" (empty: do not enqueue).
-- Returns the token; or a number below 0 if the claim has to wait: -2 minus the ms until a claim ahead of it expires, or -1 if
-- none does.
local BASE, NAME, ttl, mode, label, id, notify_target = KEYS[1], unpack(ARGV)
-- include name.lua
-- include grant.lua
local ABANDONED = BASE .. ':abandoned:' .. id
local function grant_me()
  local token = mint()
  hold(id, token, ttl, mode, label)
  return tonumber(token)
end
-- Nobody holds the name, and nobody waits for it: the rule has nothing to decide.
if not exclusive and redis.call('EXISTS', HOLDERS, WAITERS, ABANDONED) == 0 then return grant_me() end
-- include queue.lua
local held_token = token_of(id)
if held_token then -- the reply to an earlier attempt was lost
  if mode == 'x' and not exclusive then mode = 's' end -- the claim was downgraded since
  hold(id, held_token, ttl, mode, label)
  return tonumber(held_token)
end
if redis.call('EXISTS', ABANDONED) == 1 then return -1 end
-- A claim that is not to be notified is stored with an empty channel and attempt number 0.
local function enqueue_me() return enqueue(id, ttl, mode, notify_target == '' and ':0' or notify_target, label) end
local first_blocked
if not exclusive then
  local queued = redis.call('HEXISTS', WAITERS, id) == 1
  if queued then enqueue_me() end -- restart its ttl
  local token
  token, first_blocked = advance_queue(id)
  if token then return tonumber(token) end
  if not queued and not first_blocked and fits(mode) then return grant_me() end
end
if notify_target == '' then
  dequeue(id) -- without a queue entry nothing of the claim may stay
  return -1
end
local ahead = enqueue_me()
-- The first waiter watches the holders, every other one the waiter ahead of it: so one death wakes one waiter.
local ends
if not exclusive and (not first_blocked or first_blocked == id) then ahead = 0 end
while ahead > 0 and not ends do
  local other = redis.call('LINDEX', QUEUE, ahead - 1)
  local theirs = tonumber(string.match(redis.call('HGET', WAITERS, other) or '', '^%d+'))
  if theirs and theirs > now then
    ends = theirs
  else
    -- The waiter ahead has expired. Remove it, or this one would attempt again and again while the lock is held.
    redis.call('HDEL', WAITERS, other)
    redis.call('LREM', QUEUE, 1, other)
    ahead = ahead - 1
  end
end
ends = ends or (exclusive and now + redis.call('PTTL', LOCK)) or first_expiry
return ends and math.min(now - ends, 0) - 2 or -1
