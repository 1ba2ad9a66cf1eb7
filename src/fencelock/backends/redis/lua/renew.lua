-- Count the ttl of each holder anew. Returns for each 1, or 0 if it no longer holds its name.
-- KEYS: holders of each.  ARGV: id and ttl of each.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local answers = {}
for i, holders in ipairs(KEYS) do
  local id, ttl = ARGV[2 * i - 1], ARGV[2 * i]
  local ends, rest = string.match(redis.call('HGET', holders, id) or '', '^(%d+)(:.*)$')
  if ends and tonumber(ends) > now then
    -- The expiry first: a server that is out of memory allows that, and then whatever else the same script writes.
    if redis.call('PTTL', holders) <= tonumber(ttl) then
      redis.call('PEXPIREAT', holders, now + ttl + 1)
    end
    redis.call('HSET', holders, id, now + ttl + 1 .. rest)
    answers[i] = 1
  else
    answers[i] = 0
  end
end
return answers
