-- Give back the lock and hand it to the next live waiter in the same step. Returns 1 if it was still this claim's.
-- KEYS: base.  ARGV: name, id.
local BASE, NAME, id = KEYS[1], ARGV[1], ARGV[2]
local lock = BASE .. ':lock:' .. NAME
local ours = 0
local holder = redis.call('GET', lock)
if holder and string.sub(holder, 1, #id) == id then
  redis.call('DEL', lock)
  ours = 1
  if redis.call('EXISTS', BASE .. ':queue:' .. NAME) == 0 then return 1 end
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
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
