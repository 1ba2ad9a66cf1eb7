-- The least that a release can be: only by the owner. KEYS: lock. ARGV: id.
return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1])
