-- Sets min_token unless it is higher already; returns the one in force.
local current = redis.call('HGET', KEYS[1], '')
if current and tonumber(string.match(current, '^%d+')) >= tonumber(ARGV[1]) then return current end
redis.call('HSET', KEYS[1], '', ARGV[1] .. ' ')
return ARGV[1] .. ' '
