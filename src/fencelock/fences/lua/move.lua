-- Puts the mark where it is told to, for anybody's token; answers what was there before.
local before = redis.call('HGET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ')
return before
