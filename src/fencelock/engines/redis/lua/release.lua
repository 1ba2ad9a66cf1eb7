-- Release the lock and hand it to the next live waiter in the same step. Returns 1, or 0 if this claim no longer held it.
-- KEYS: base.  ARGV: name, id.
local BASE, NAME, id = KEYS[1], ARGV[1], ARGV[2]
-- include name.lua
if holds_exclusively(id) and redis.call('EXISTS', QUEUE) == 0 then return redis.call('DEL', LOCK) end -- nobody waits
-- include grant.lua
-- include queue.lua
local was_held = drop(id)
advance_queue()
return was_held and 1 or 0
