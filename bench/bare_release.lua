-- The fewest commands of a release: delete the lock if its value is this id. KEYS: lock. ARGV: id.
return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1])
