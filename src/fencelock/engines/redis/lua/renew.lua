-- Restart the ttl of each holder. Returns 1 for each, or 0 if it no longer holds its name.
-- KEYS: base of each.  ARGV: name, id and ttl of each.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local replies = {}
for i, base in ipairs(KEYS) do
  local name, id, ttl = ARGV[3 * i - 2], ARGV[3 * i - 1], ARGV[3 * i]
  local lock, holders = base .. ':lock:' .. name, base .. ':holders:' .. name
  replies[i] = 0
  if string.sub(redis.call('GET', lock) or '', 1, #id) == id then
    replies[i] = redis.call('PEXPIRE', lock, ttl)
  else
    local ends, rest = string.match(redis.call('HGET', holders, id) or '', '^(%d+)(:.*)$')
    if ends and tonumber(ends) > now then
      -- PEXPIRE first: a server that is out of memory allows it, and then also the later writes of the same script.
      redis.call('PEXPIRE', holders, math.max(redis.call('PTTL', holders), ttl))
      redis.call('HSET', holders, id, now + ttl .. rest)
      replies[i] = 1
    end
  end
end
return replies
