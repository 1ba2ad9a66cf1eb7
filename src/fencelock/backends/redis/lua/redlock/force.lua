-- Free this node, whoever has it. Returns the attempt that had it: "id:proposal", or nothing. Whatever comes later has to
-- be above it, as nothing ever lowers what this node has seen.
-- KEYS: lock, seen, before, queue, waiters.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- include redlock/last.lua
local had = string.match(redis.call('GET', LOCK) or '', '^([^:]*:%d+):')
redis.call('DEL', LOCK)
call_next()
return had
