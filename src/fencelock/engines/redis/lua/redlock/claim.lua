-- Accept a proposal, if this node is free and has seen no proposal as high.
-- KEYS: base.  ARGV: name, ttl, label, id, proposal.
-- Returns {1}: accepted; {0, ms}: another claim holds this node, for that long; {-1, highest seen}: the proposal is too low.
-- include redlock/node.lua
local _, ttl, label, id, proposal = unpack(ARGV)
-- include redlock/last.lua
local highest_seen = math.max(last, tonumber(created))
local is_higher = tonumber(proposal) > highest_seen
local mine = id .. ':' .. proposal .. ':' .. label
-- The usual case first: the node is free and the proposal is high enough.
if not (is_higher and redis.call('SET', LOCK, mine, 'PX', ttl, 'NX')) then
  local holder, held = string.match(redis.call('GET', LOCK) or '', '^([^:]*):(%d+):')
  if holder == id and held == proposal then
    redis.call('PEXPIRE', LOCK, ttl) -- repeated, because a reply was lost
    return {1}
  end
  -- A lower proposal of the same claim is obsolete: its client makes this one instead.
  if holder and (holder ~= id or tonumber(held) > tonumber(proposal)) then return {0, redis.call('PTTL', LOCK)} end
  if not is_higher then return {-1, highest_seen} end
  redis.call('SET', LOCK, mine, 'PX', ttl)
end
set_last(proposal)
if redis.call('HDEL', BASE .. ':waiters:' .. NAME, id) == 1 then redis.call('ZREM', BASE .. ':queue:' .. NAME, id) end
return {1}
