-- Forgets a mark below the floor, which must have been raised before; answers whether it did.
local mark = redis.call('GET', KEYS[1])
if mark and tonumber(string.match(mark, '^%d+')) < tonumber(ARGV[1]) then return redis.call('DEL', KEYS[1]) end
return 0
