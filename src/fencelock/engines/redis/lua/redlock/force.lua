-- Free this node, whoever has it. Returns the attempt that had it: "id:proposal", or nothing. Whatever comes later has to
-- be above it, as nothing ever lowers what this node has seen.
-- KEYS: base.  ARGV: name.
-- include redlock/node.lua
-- include redlock/line.lua
local had = string.match(redis.call('GET', LOCK) or '', '^([^:]*:%d+):')
redis.call('DEL', LOCK)
call_next()
return had
