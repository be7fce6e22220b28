-- KEYS waiting, wake, done, done of the heir, slots, lock... (one lock, or the slots of a semaphore), over...
-- ARGV owner, wake ms, record, record ms (0: no record), heir's value, heir's ms (0: no heir), over ms, slots of the
--      semaphore, locks that are named, repeated (1: a release that was not answered, and may have been carried out)
-- -> 1 released | 2 released, and somebody waits who is still to be woken (wake ms 0) | 0 no longer ours
-- Deletes first: a script whose first write is refused for lack of memory does nothing at all.
local waiting, wake, done, heir_done, in_use = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local owner, wake_ms, record, record_ms, heir, heir_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

local ours
for i = 6, 5 + ARGV[9] do
  local value = redis.pcall('GET', KEYS[i])
  if type(value) == 'string' and string.sub(value, 1, #owner) == owner then
    ours = KEYS[i]
    redis.call('DEL', ours)
  end
end
for i = 6 + ARGV[9], #KEYS do
  redis.pcall('SET', KEYS[i], 1, 'PX', ARGV[7])
end
if record_ms ~= '0' then
  -- Also when the lock is no longer ours: the message was carried out all the same.
  if ARGV[10] == '1' then
    -- What is there may be newer. Or it is this one, of a try that lay before the server and was given the whole time.
    if not redis.pcall('SET', done, record, 'PX', record_ms, 'NX') and redis.pcall('GET', done) == record
        and redis.call('PTTL', done) > tonumber(record_ms) then
      redis.call('PEXPIRE', done, record_ms)
    end
  else
    redis.pcall('SET', done, record, 'PX', record_ms)
  end
end
if not ours then
  return 0
end
-- An heir that has been carried out meanwhile does not come again.
if heir_ms ~= '0' and (heir_done == done or redis.call('EXISTS', heir_done) == 0) then
  redis.call('SET', ours, heir, 'PX', heir_ms)
  local left = redis.call('PTTL', in_use)
  if left > 0 and left < tonumber(heir_ms) then
    redis.call('PEXPIRE', in_use, heir_ms)
  end
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
