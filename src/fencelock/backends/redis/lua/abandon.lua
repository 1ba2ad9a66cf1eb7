-- Leave the queue or give back the lock, whichever it was, and let no straggler of the claim in for one ttl.
-- KEYS: token, holders, queue, waiters, gone.  ARGV: id, ttl.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- include queue.lua
redis.call('HDEL', HOLDERS, ARGV[1])
leave_line(ARGV[1])
-- A server that is out of memory still lets us go.
redis.pcall('SET', KEYS[5], '', 'PX', ARGV[2])
settle()
return 1
