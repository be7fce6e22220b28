-- Ends a hold, before free.lua does the rest: in most cases there is no rest, with no record, or nothing but a record.
-- Rare keys and arguments are left out, as in request.lua.
-- KEYS waiting, wake, [record (if record ms is not 0),] [slots, record of the message that it is reserved for (both if there is a reservation),]
--      lock... (one lock, or the slots of a semaphore), over...
-- ARGV owner, wake ms (0: wake nobody); and the following, up to the last that differs from its default:
--      record, record ms (0: no record), repeated (1: this was not answered before, and may have been carried out; 0),
--      value of the reservation, its ms (0: no reservation), over ms, limit (1), locks that are named (1)
-- -> 1 freed | 2 freed, and a waiter is still to be woken (wake ms 0) | 0 no longer held
-- Deletes first: a script whose first write is refused for lack of memory does nothing at all.
local NOT_OURS, FREED, SOMEBODY_WAITS = 0, 1, 2
local owner, wake_ms, record, record_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4] or '0'
local repeated, reserved, reserved_ms = ARGV[5] or '0', ARGV[6], ARGV[7] or '0'
local over_ms, limit, locks = ARGV[8], ARGV[9] or '1', tonumber(ARGV[10] or 1)

local waiting, wake, FIRST = KEYS[1], KEYS[2], 3
local done, in_use, done_of_next
if record_ms ~= '0' then
  done, FIRST = KEYS[FIRST], FIRST + 1
end
if reserved_ms ~= '0' then
  in_use, done_of_next, FIRST = KEYS[FIRST], KEYS[FIRST + 1], FIRST + 2
end

local ours
for i = FIRST, FIRST + locks - 1 do
  local value = redis.pcall('GET', KEYS[i])
  if type(value) == 'string' and string.sub(value, 1, #owner) == owner then
    ours = KEYS[i]
    redis.call('DEL', ours)
  end
end
local somebody_waits = ours and redis.call('EXISTS', waiting) == 1
local is_plain = ours and not somebody_waits and #KEYS == FIRST
if is_plain and (#ARGV == 2 or #ARGV == 4 and redis.call('SET', done, record, 'PX', record_ms, 'NX')) then
  return FREED
end
