-- Give this node back, if it is this very attempt's, and see to it that the attempt can no longer take it: it may still be
-- on its way here. Returns 1 if the attempt had the node.
-- KEYS: lock, seen, before, queue, waiters.  ARGV: name, id, proposal (0: none was made); and for who stays in line:
-- ttl, owner, channel, ticket.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- include redlock/last.lua
local name, id, proposal, ttl, owner, channel, ticket = unpack(ARGV)
local had = 0
local holder, held = string.match(redis.call('GET', LOCK) or '', '^([^:]*):(%d+):')
if holder == id and held == proposal then
  redis.call('DEL', LOCK)
  had, holder = 1, nil
end
if ticket then line_up(id, ttl, owner, channel, ticket) else leave_line(id) end
if not holder then call_next() end
if tonumber(proposal) > 0 then
  local state = turn(name)
  -- One above it: a heal that is still on its way, too, comes too late.
  local above = string.format('%.0f', proposal + 1)
  if tonumber(above) > last(name, state) then raise(name, above, state) end
end
return had
