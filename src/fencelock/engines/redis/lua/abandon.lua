-- Leave the queue or give back the lock, whichever it was, and let no straggler of the claim in for one ttl.
-- KEYS: base.  ARGV: name, id, ttl.
local BASE, NAME, id, ttl = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
-- include queue.lua
drop(id)
leave_line(id)
-- A server that is out of memory still lets us go.
redis.pcall('SET', BASE .. ':gone:' .. id, '', 'PX', ttl)
settle()
return 1
