-- Give back what a reservation took from each rate limit that was not charged again since.
-- KEYS: the key of each limit.  ARGV: the time that the reservation stored, and its cost, of each, in µs.
for i, key in ipairs(KEYS) do
  local stored = redis.call('GET', key)
  if stored and tonumber(stored) == tonumber(ARGV[2 * i - 1]) then
    redis.call('SET', key, string.format('%.0f', stored - ARGV[2 * i]), 'KEEPTTL')
  end
end
return 1
