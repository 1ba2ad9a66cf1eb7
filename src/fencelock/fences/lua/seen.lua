-- What a token is compared with: the mark, else the floor.
local found = redis.call('HMGET', KEYS[1], ARGV[1], '')
return found[1] or found[2]
