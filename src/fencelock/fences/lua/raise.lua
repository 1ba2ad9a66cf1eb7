-- Puts the floor there unless it is higher already.
local floor = redis.call('GET', KEYS[1])
if not floor or tonumber(string.match(floor, '^%d+')) < tonumber(ARGV[1]) then redis.call('SET', KEYS[1], ARGV[1] .. ' ') end
return 1
