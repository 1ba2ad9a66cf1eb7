-- Make the exclusive holder a shared one, in place, and admit the readers directly behind it. Its token stays, its ttl restarts.
-- Returns 1, or 0 if this claim no longer holds the lock.
-- KEYS: base.  ARGV: name, id, ttl.
local BASE, NAME, id, ttl = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
-- include name.lua
-- include grant.lua
-- include queue.lua
local token = token_of(id)
if not token then return 0 end
local label
if exclusive then
  label = string.match(exclusive, '^[^:]*:%d+:%d+:(.*)$')
  redis.call('DEL', LOCK)
  exclusive = false
else -- the reply to an earlier downgrade was lost
  label = string.match(redis.call('HGET', HOLDERS, id), '^%d+:%d+:%d+:[^:]*:(.*)$')
end
hold(id, token, ttl, 's', label)
sharing = redis.call('HGETALL', HOLDERS)
advance_queue()
return 1
