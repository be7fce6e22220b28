-- KEYS lock, waiting, wake, done (the last one is missing where nothing is to be recorded)
-- ARGV owner, wake ms, record, record ms, heir's value, heir's ms (0: no heir)
-- -> 1 released | 0 no longer ours
-- Deletes first: a script whose first write is refused for lack of memory does nothing at all.
local lock, waiting, wake, done = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local owner, wake_ms, record, record_ms, heir, heir_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

local value = redis.pcall('GET', lock)
local ours = type(value) == 'string' and string.sub(value, 1, #owner) == owner
if ours then
  redis.call('DEL', lock)
end
if done then
  -- Also when the lock is no longer ours: the message was carried out all the same.
  redis.pcall('SET', done, record, 'PX', record_ms)
end
if not ours then
  return 0
end
if heir_ms ~= '0' then
  redis.call('SET', lock, heir, 'PX', heir_ms)
end
if redis.call('EXISTS', waiting) == 1 then
  redis.call('DEL', wake)
  redis.call('RPUSH', wake, 1)
  redis.call('PEXPIRE', wake, wake_ms)
end
return 1
