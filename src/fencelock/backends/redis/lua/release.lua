-- Give back the lock and hand it to the next live waiter in the same step. Returns 1 if it was still this claim's.
-- KEYS: token, holders, queue, waiters.  ARGV: id.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ours = 0
local mine = redis.call('HGET', KEYS[2], ARGV[1])
if mine then
  if tonumber(string.match(mine, '^%d+')) > now then ours = 1 end
  redis.call('HDEL', KEYS[2], ARGV[1])
end
if redis.call('EXISTS', KEYS[3]) == 0 then return ours end
-- include queue.lua
settle()
return ours
