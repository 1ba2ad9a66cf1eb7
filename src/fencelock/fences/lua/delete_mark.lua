-- Deletes a mark below min_token, which must have been raised before; returns whether it did.
local mark = redis.call('HGET', KEYS[1], ARGV[1])
if mark and tonumber(string.match(mark, '^%d+')) < tonumber(ARGV[2]) then return redis.call('HDEL', KEYS[1], ARGV[1]) end
return 0
