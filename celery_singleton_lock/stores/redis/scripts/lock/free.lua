-- Frees a lock; remembers a record, reserves the lock, gives the owner up, as asked.
-- Follows now.lua and ended.lua.
-- KEYS waiting, wake, record, record of whom it is reserved for, slots, messages that are over,
--      more of them, more that has whom it is reserved for, aside (see now.lua), lock... (one lock, or the slots of a semaphore), over...
-- ARGV owner, wake ms (0: wake nobody), over ms, limit, locks that are named,
--      repeated (1: this was not answered before, and may have been carried out),
--      record, record ms (0: no record), value of the reservation, its ms (0: no reservation),
--      name of the message among those that are over, ms for which it is one (0: the record alone says that),
--      name of whom it is reserved for
-- -> 1 freed | 2 freed, and somebody waits who is still to be woken (wake ms 0) | 0 no longer ours
-- Deletes first: a script whose first write is refused for lack of memory does nothing at all.
local NOT_OURS, FREED, SOMEBODY_WAITS = 0, 1, 2
local waiting, wake, done, done_of_next, in_use = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local ended, more, more_of_next, aside = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local FIRST = 10
local owner, wake_ms, over_ms, limit, locks, repeated = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]
local record, record_ms, reserved, reserved_ms = ARGV[7], ARGV[8], ARGV[9], ARGV[10]
local name, ended_ms, name_of_next = ARGV[11], ARGV[12], ARGV[13]

local ours
for i = FIRST, FIRST + locks - 1 do
  local value = redis.pcall('GET', KEYS[i])
  if type(value) == 'string' and string.sub(value, 1, #owner) == owner then
    ours = KEYS[i]
    redis.call('DEL', ours)
  end
end
for i = FIRST + locks, #KEYS do
  redis.pcall('SET', KEYS[i], 1, 'PX', over_ms)
end
if record_ms ~= '0' then
  -- Also when the lock is no longer ours: the message was carried out all the same. Nothing was deleted then, and for lack
  -- of memory this is an error: it is said again.
  if repeated == '1' then
    -- What is there may be newer. Or it is this one, of a try that lay before the server and was given the whole time.
    if known_for(ended, more, name, aside) then
      record_ms = '0'
    elseif not redis.call('SET', done, record, 'PX', record_ms, 'NX') then
      local there = redis.pcall('GET', done)
      if there == record and redis.call('PTTL', done) > tonumber(record_ms) then
        redis.call('PEXPIRE', done, record_ms)
      elseif type(there) == 'string' and there ~= record and string.sub(there, 1, 1) ~= '?' then
        record_ms = '0'
      end
    end
  else
    redis.call('SET', done, record, 'PX', record_ms)
  end
  if record_ms ~= '0' and ended_ms ~= '0' and not note_end(ended, more, name, tonumber(ended_ms), aside) then
    redis.pcall('PEXPIRE', done, ended_ms)
  end
end
if not ours then
  return NOT_OURS
end
-- Whoever it is reserved for, and has been carried out meanwhile, does not come again.
if reserved_ms ~= '0' and (done_of_next == done
    or redis.call('EXISTS', done_of_next) == 0 and not known_for(ended, more_of_next, name_of_next, aside)) then
  redis.call('SET', ours, reserved, 'PX', reserved_ms)
  local left = redis.call('PTTL', in_use)
  if left > 0 and left < tonumber(reserved_ms) then
    redis.call('PEXPIRE', in_use, reserved_ms)
  end
end
if redis.call('EXISTS', waiting) == 1 then
  if wake_ms == '0' then
    return SOMEBODY_WAITS
  end
  redis.call('RPUSH', wake, 1)
  redis.call('LTRIM', wake, -limit, -1)
  redis.call('PEXPIRE', wake, wake_ms)
end
return FREED
