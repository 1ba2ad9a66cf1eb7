-- Give back the lock and hand it to the next live waiter in the same step. Returns "not held" if it was no longer this
-- claim's, "handed over" if an exclusive holder followed at once, else "released".
-- KEYS: base.  ARGV: name, id.
local BASE, NAME, id = KEYS[1], ARGV[1], ARGV[2]
local lock, queue, waiters = BASE .. ':lock:' .. NAME, BASE .. ':queue:' .. NAME, BASE .. ':waiters:' .. NAME
local ours = false
local time, clock, now
if string.sub(redis.call('GET', lock) or '', 1, #id) == id then
  ours = true
  local first = redis.call('LPOP', queue) -- first of all: a server that is out of memory allows that, and then all else
  if not first then
    redis.call('DEL', lock)
    return 'released'
  end
  time = redis.call('TIME')
  clock = time[1] .. string.sub('00000' .. time[2], -6)
  now = tonumber(string.sub(clock, 1, -4))
  local ends, ttl, channel, round, owner =
    string.match(redis.call('HGET', waiters, first) or '', '^(%d+):(%d+):x:([^:]*):(%d+):(.*)$')
  -- As `listens` asks, and why.
  local there = ends and redis.pcall('PUBSUB', 'NUMSUB', channel)
  if there and tonumber(ends) > now and (there.err or there[2] > 0) then
    -- The ordinary case, an exclusive holder after another: what `settle` would do, in as few steps as possible.
    local token = clock
    local last = redis.call('SET', BASE, token, 'GET')
    if last and (#last > #token or (#last == #token and last >= token)) then
      token = string.format('%.0f', last + 1)
      redis.call('SET', BASE, token)
    end
    if not there.err then redis.pcall('PUBLISH', channel, first .. ':' .. token .. ':' .. round) end
    redis.call('HDEL', waiters, first)
    redis.call('SET', lock, first .. ':' .. token .. ':' .. ttl .. ':' .. owner, 'PX', ttl)
    return 'handed over'
  end
  redis.call('LPUSH', queue, first)
  redis.call('PEXPIRE', queue, redis.call('PTTL', waiters)) -- it may have been the only one
  redis.call('DEL', lock)
else
  time = redis.call('TIME')
  clock = time[1] .. string.sub('00000' .. time[2], -6)
  now = tonumber(string.sub(clock, 1, -4))
end
-- include queue.lua
if not ours then
  local ends = string.match(redis.call('HGET', HOLDERS, id) or '', '^%d+')
  if ends then
    if tonumber(ends) > now then ours = true end
    redis.call('HDEL', HOLDERS, id)
  end
end
settle()
return ours and 'released' or 'not held'
