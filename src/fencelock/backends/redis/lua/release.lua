-- Give back the lock and hand it to the next live waiter in the same step. Returns 1 if it was still this claim's.
-- KEYS: base.  ARGV: name, id.
local BASE, NAME, id = KEYS[1], ARGV[1], ARGV[2]
local lock, queue, waiters = BASE .. ':lock:' .. NAME, BASE .. ':queue:' .. NAME, BASE .. ':waiters:' .. NAME
local ours = 0
local time, now
if string.sub(redis.call('GET', lock) or '', 1, #id) == id then
  ours = 1
  local first = redis.call('LINDEX', queue, 0)
  redis.call('DEL', lock) -- first of all: a server that is out of memory allows that, and then whatever else is written
  if not first then return 1 end
  time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
  local ends, ttl, channel, round, owner =
    string.match(redis.call('HGET', waiters, first) or '', '^(%d+):(%d+):x:([^:]*):(%d+):(.*)$')
  if ends and tonumber(ends) > now then
    -- The ordinary case, an exclusive holder after another: what `settle` would do, in as few steps as possible.
    local token = time[1] .. string.format('%06d', time[2])
    local last = redis.call('SET', BASE, token, 'GET')
    if last and tonumber(last) >= tonumber(token) then
      token = string.format('%.0f', last + 1)
      redis.call('SET', BASE, token)
    end
    local heard = redis.pcall('PUBLISH', channel, first .. ':' .. token .. ':' .. round)
    if type(heard) == 'table' or heard > 0 then
      redis.call('LPOP', queue)
      redis.call('HDEL', waiters, first)
      redis.call('SET', lock, first .. ':' .. token .. ':' .. ttl .. ':' .. owner, 'PX', ttl + 1)
      return 1
    end
  end
else
  time = redis.call('TIME')
  now = time[1] * 1000 + math.floor(time[2] / 1000)
end
-- include queue.lua
if ours == 0 then
  local ends = string.match(redis.call('HGET', HOLDERS, id) or '', '^%d+')
  if ends then
    if tonumber(ends) > now then ours = 1 end
    redis.call('HDEL', HOLDERS, id)
  end
end
settle()
return ours
