-- Puts the floor there unless it is higher already; answers what it is.
local floor = redis.call('HGET', KEYS[1], '')
if floor and tonumber(string.match(floor, '^%d+')) >= tonumber(ARGV[1]) then return floor end
redis.call('HSET', KEYS[1], '', ARGV[1] .. ' ')
return ARGV[1] .. ' '
