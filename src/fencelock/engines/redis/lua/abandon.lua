-- Remove the claim from the queue, or release it if it was granted. For one ttl, refuse attempts of this claim that arrive late.
-- KEYS: base.  ARGV: name, id, ttl.
local BASE, NAME, id, ttl = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
-- include name.lua
-- include grant.lua
-- include queue.lua
drop(id)
dequeue(id)
-- pcall: on a server that is out of memory this write may fail, and the claim must still go.
redis.pcall('SET', BASE .. ':abandoned:' .. id, '', 'PX', ttl)
advance_queue()
return 1
