-- Release this node if this proposal holds it, and refuse the proposal if it arrives later. Returns 1 if the proposal held
-- the node, else 0.
-- KEYS: base.  ARGV: name, id, proposal (0: none was made); and to enqueue the claim: ttl, label, channel, ticket.
-- include redlock/node.lua
local _, id, proposal, ttl, label, channel, ticket = unpack(ARGV)
local mine = id .. ':' .. proposal .. ':'
local holder = redis.call('GET', LOCK)
local released = holder and string.sub(holder, 1, #mine) == mine and redis.call('DEL', LOCK) or 0
if ticket or redis.call('EXISTS', BASE .. ':queue:' .. NAME) == 1 then
  -- include redlock/queue.lua
  if ticket then enqueue(id, ttl, label, channel, ticket) else dequeue(id) end
  if released == 1 or not holder then notify_next() end
end
if tonumber(proposal) > 0 then
  -- include redlock/last.lua
  local raised = string.format('%.0f', proposal + 1) -- one above the proposal: so a heal that arrives later is refused, too
  if tonumber(raised) > last then set_last(raised) end
end
return released
