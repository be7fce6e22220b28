-- KEYS wake  ARGV wake ms, the most wake-ups that are kept (0: all)
redis.pcall('RPUSH', KEYS[1], 1)
if ARGV[2] ~= '0' then
  redis.pcall('LTRIM', KEYS[1], -tonumber(ARGV[2]), -1)
end
return redis.call('PEXPIRE', KEYS[1], ARGV[1])
