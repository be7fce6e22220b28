-- KEYS list of a process  ARGV element to add, the most elements that are kept, ms for which they are kept
redis.call('RPUSH', KEYS[1], ARGV[1])
redis.call('LTRIM', KEYS[1], -tonumber(ARGV[2]), -1)
return redis.call('PEXPIRE', KEYS[1], ARGV[3])
