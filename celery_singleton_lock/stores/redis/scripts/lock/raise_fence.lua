-- KEYS fence, lock  ARGV owner, fence, fence ttl ms
-- -> 1 the counter is at least as high now | 0 the lock is not held here
local value = redis.pcall('GET', KEYS[2])
if type(value) ~= 'string' or string.sub(value, 1, #ARGV[1]) ~= ARGV[1] then
  return 0
end
if tonumber(redis.call('GET', KEYS[1]) or 0) < tonumber(ARGV[2]) then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
return 1
