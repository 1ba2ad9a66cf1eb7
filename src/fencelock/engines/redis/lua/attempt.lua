-- Acquire the lock or enqueue the claim, in one step that also mints the token. An attempt of a claim that already holds the
-- lock or waits restarts its ttl.
-- KEYS: base.  ARGV: name, ttl, mode, label, id, address: "channel:attempt_no" (empty: do not enqueue).
-- Returns the token; or a number below 0 if the claim has to wait: -1, or -2 minus the ms after which it should attempt
-- again.
local BASE, NAME, ttl, mode, label, id, address = KEYS[1], unpack(ARGV)
-- include queue.lua
local held_token = token_of(id)
if held_token then -- the reply to an earlier attempt was lost
  if mode == 'x' and not exclusive then mode = 's' end -- the claim was downgraded since
  hold(id, held_token, ttl, mode, label)
  return tonumber(held_token)
end
if redis.call('EXISTS', BASE .. ':gone:' .. id) == 1 then return -1 end
local queued = redis.call('HEXISTS', WAITERS, id) == 1
local function enqueue_me() enqueue(id, ttl, mode, address == '' and ':0' or address, label) end
if queued then enqueue_me() end -- restart its ttl
local token, first = advance_queue(id)
if not token and not queued and not first and fits(mode) then
  token = mint()
  hold(id, token, ttl, mode, label)
end
if token then return tonumber(token) end
if address == '' then
  dequeue(id) -- the last attempt of a wait leaves nothing behind
  return -1
end
if not queued then enqueue_me() end
-- The first waiter watches the holders, every other one the waiter ahead of it: so one death wakes one waiter.
local ends
local is_first = not exclusive and (not first or first == id)
local place = is_first and 0 or redis.call('LPOS', QUEUE, id, 'RANK', -1)
while place > 0 and not ends do
  local ahead = redis.call('LINDEX', QUEUE, place - 1)
  local theirs = tonumber(string.match(redis.call('HGET', WAITERS, ahead) or '', '^%d+'))
  if theirs and theirs > now then
    ends = theirs
  else
    -- The waiter ahead has expired. Remove it, or this one would attempt again and again while the lock is held.
    redis.call('HDEL', WAITERS, ahead)
    redis.call('LREM', QUEUE, 1, ahead)
    place = place - 1
  end
end
ends = ends or (exclusive and now + redis.call('PTTL', LOCK)) or soonest
return ends and math.min(now - ends, 0) - 2 or -1
