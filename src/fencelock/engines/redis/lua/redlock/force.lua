-- Release this node, whatever claim holds it. Returns the attempt that held it, "id:proposal", or nothing. Later proposals
-- have to be higher, as nothing ever lowers what this node has seen.
-- KEYS: base.  ARGV: name.
-- include redlock/node.lua
-- include redlock/queue.lua
local held_by = string.match(redis.call('GET', LOCK) or '', '^([^:]*:%d+):')
redis.call('DEL', LOCK)
notify_next()
return held_by
