-- What a token is compared with: the mark, else the floor.
return redis.call('GET', KEYS[1]) or redis.call('GET', KEYS[2])
