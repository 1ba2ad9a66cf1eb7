-- Release the lock and hand it to the next live waiter in the same step. Returns 1, or 0 if this claim no longer held it.
-- KEYS: base.  ARGV: name, id.
local BASE, NAME, id = KEYS[1], ARGV[1], ARGV[2]
-- include queue.lua
local held = drop(id)
advance_queue()
return held and 1 or 0
