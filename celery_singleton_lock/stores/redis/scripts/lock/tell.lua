-- KEYS list of a process  ARGV what it is told, how much is kept at most, ms for which that is
redis.call('RPUSH', KEYS[1], ARGV[1])
redis.call('LTRIM', KEYS[1], -tonumber(ARGV[2]), -1)
return redis.call('PEXPIRE', KEYS[1], ARGV[3])
