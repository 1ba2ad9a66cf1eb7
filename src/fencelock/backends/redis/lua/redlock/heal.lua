-- Give a lease that a majority of the nodes still has back to this one, which forgot it or never knew it: only if nobody
-- else has been here since. Returns 1 if it did.
-- KEYS: lock, seen, before, queue, waiters.  ARGV: name, id, proposal, ttl, owner.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- include redlock/last.lua
local name, id, proposal, ttl, owner = unpack(ARGV)
local state = turn(name)
local known = last(name, state)
if redis.call('EXISTS', LOCK) == 1 or tonumber(proposal) < known then return 0 end
if tonumber(proposal) > known then raise(name, proposal, state) end
take(id, proposal, ttl, owner)
return 1
