-- KEYS waiting, wake, done, over, lock...: one lock, or the slots of a semaphore
-- ARGV owner, wake ms, record, record ms (0: no record), heir's value, heir's ms (0: no heir), over ms (0: not needed),
--      slots of the semaphore
-- -> 1 released | 2 released, and somebody waits who is still to be woken (wake ms 0) | 0 no longer ours
-- Deletes first: a script whose first write is refused for lack of memory does nothing at all.
local waiting, wake, done, over = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local owner, wake_ms, record, record_ms, heir, heir_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

local ours
for i = 5, #KEYS do
  local value = redis.pcall('GET', KEYS[i])
  if type(value) == 'string' and string.sub(value, 1, #owner) == owner then
    ours = KEYS[i]
    redis.call('DEL', ours)
  end
end
if ARGV[7] ~= '0' then
  redis.pcall('SET', over, 1, 'PX', ARGV[7])
end
if record_ms ~= '0' then
  -- Also when the lock is no longer ours: the message was carried out all the same.
  redis.pcall('SET', done, record, 'PX', record_ms)
end
if not ours then
  return 0
end
if heir_ms ~= '0' then
  redis.call('SET', ours, heir, 'PX', heir_ms)
end
if redis.call('EXISTS', waiting) == 1 then
  if wake_ms == '0' then
    return 2
  end
  redis.call('RPUSH', wake, 1)
  redis.call('LTRIM', wake, -ARGV[8], -1)
  redis.call('PEXPIRE', wake, wake_ms)
end
return 1
