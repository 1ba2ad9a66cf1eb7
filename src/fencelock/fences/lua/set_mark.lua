-- Sets the mark of a resource, so that any claim with this token or a higher one is accepted; returns the mark before.
local before = redis.call('HGET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ')
return before
