-- KEYS wake  ARGV wake ms, the most wake-ups that are kept (0: all)
-- As passed on: whoever takes the lock meanwhile leaves it, see acquire.lua.
local length = redis.pcall('RPUSH', KEYS[1], 2)
if ARGV[2] ~= '0' and type(length) == 'number' and length > tonumber(ARGV[2]) then
  -- No more than before. Nor fewer: there may be more of a semaphore, of which the caller does not know.
  redis.call('LTRIM', KEYS[1], 1, -1)
end
return redis.call('PEXPIRE', KEYS[1], ARGV[1])
