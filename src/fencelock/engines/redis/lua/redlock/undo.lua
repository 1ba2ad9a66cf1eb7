-- Give this node back, if it is this very attempt's, and see to it that the attempt can no longer take it: it may still be
-- on its way here. Returns 1 if the attempt had the node.
-- KEYS: base.  ARGV: name, id, proposal (0: none was made); and for who stays in line: ttl, owner, channel, ticket.
-- include redlock/node.lua
local _, id, proposal, ttl, owner, channel, ticket = unpack(ARGV)
local mine = id .. ':' .. proposal .. ':'
local holder = redis.call('GET', LOCK)
local had = holder and string.sub(holder, 1, #mine) == mine and redis.call('DEL', LOCK) or 0
if ticket or redis.call('EXISTS', BASE .. ':queue:' .. NAME) == 1 then
  -- include redlock/line.lua
  if ticket then line_up(id, ttl, owner, channel, ticket) else leave_line(id) end
  if had == 1 or not holder then call_next() end
end
if tonumber(proposal) > 0 then
  -- One above it: a heal that is still on its way, too, comes too late.
  local above = string.format('%.0f', proposal + 1)
  local seen, highest = unpack(redis.call('HMGET', SEEN, NAME, '\0high'))
  if seen == proposal then
    redis.call('HSET', SEEN, NAME, above, '\0high', tonumber(above) > tonumber(highest) and above or highest)
  else
    -- include redlock/last.lua
    if tonumber(above) > last then raise(above) end
  end
end
return had
