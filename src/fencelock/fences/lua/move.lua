-- Puts the mark where it is told to, for anybody's token; answers what was there before.
local before = redis.call('GET', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1] .. ' ')
return before
