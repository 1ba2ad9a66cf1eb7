-- Put back a lease that a majority of the nodes has and this one lost or never got, unless this node has seen a higher
-- proposal since. Returns 1 if it did, else 0.
-- KEYS: base.  ARGV: name, ttl, label, id, proposal.
-- include redlock/node.lua
local _, ttl, label, id, proposal = unpack(ARGV)
-- include redlock/last.lua
if redis.call('EXISTS', LOCK) == 1 or tonumber(proposal) < last then return 0 end
if tonumber(proposal) > last then set_last(proposal) end
redis.call('SET', LOCK, id .. ':' .. proposal .. ':' .. label, 'PX', ttl)
return 1
