-- KEYS wake  ARGV wake ms, wake-ups kept at most
-- A wake-up that somebody took who does not need it any more, for the next waiter.
redis.call('RPUSH', KEYS[1], 1)
redis.call('LTRIM', KEYS[1], -tonumber(ARGV[2]), -1)
return redis.call('PEXPIRE', KEYS[1], ARGV[1])
