-- Leave the queue or give back the lock, whichever it was, and let no straggler of the claim in for one ttl.
-- KEYS: base.  ARGV: name, id, ttl.
local BASE, NAME, id, ttl = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local time = redis.call('TIME')
local clock = time[1] .. string.sub('00000' .. time[2], -6)
local now = tonumber(string.sub(clock, 1, -4))
-- include queue.lua
if string.sub(redis.call('GET', LOCK) or '', 1, #id) == id then redis.call('DEL', LOCK) end
redis.call('HDEL', HOLDERS, id)
leave_line(id)
-- A server that is out of memory still lets us go.
redis.pcall('SET', BASE .. ':gone:' .. id, '', 'PX', ttl)
settle()
return 1
