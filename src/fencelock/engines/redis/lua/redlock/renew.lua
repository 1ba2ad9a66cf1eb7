-- Restart the ttl of each lease that this node still has. Returns 1 or 0 for each.
-- KEYS: lock of each.  ARGV: id, proposal and ttl of each.
local replies = {}
for i, lock in ipairs(KEYS) do
  local id, proposal, ttl = ARGV[3 * i - 2], ARGV[3 * i - 1], ARGV[3 * i]
  local holder, held = string.match(redis.call('GET', lock) or '', '^([^:]*):(%d+):')
  replies[i] = 0
  if holder == id and held == proposal then
    replies[i] = redis.call('PEXPIRE', lock, ttl)
  end
end
return replies
