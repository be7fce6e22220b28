-- KEYS wake  ARGV wake ms, wake-ups kept at most (0: all)
redis.call('RPUSH', KEYS[1], 1)
if ARGV[2] ~= '0' then
  redis.call('LTRIM', KEYS[1], -tonumber(ARGV[2]), -1)
end
return redis.call('PEXPIRE', KEYS[1], ARGV[1])
