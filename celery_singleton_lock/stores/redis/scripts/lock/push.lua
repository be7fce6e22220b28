-- Wakes a waiter: its name comes into its process's mailbox.
-- KEYS mailbox  ARGV name, ms for which it is kept
redis.call('RPUSH', KEYS[1], ARGV[1])
redis.call('LTRIM', KEYS[1], -1000, -1)
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
