-- KEYS lock, waiting, wake  ARGV owner, wake ms
-- -> 1 released | 0 no longer ours
-- Deletes first: a script whose first write is refused for lack of memory does nothing at all.
local lock, waiting, wake = KEYS[1], KEYS[2], KEYS[3]
local owner, wake_ms = ARGV[1], ARGV[2]

local value = redis.call('GET', lock)
if not value or string.sub(value, 1, #owner) ~= owner then
  return 0
end
redis.call('DEL', lock)
if redis.call('EXISTS', waiting) == 1 then
  redis.call('DEL', wake)
  redis.call('RPUSH', wake, 1)
  redis.call('PEXPIRE', wake, wake_ms)
end
return 1
