-- Returns what a token is compared with: the mark of the resource, or else min_token.
local found = redis.call('HMGET', KEYS[1], ARGV[1], '')
return found[1] or found[2]
