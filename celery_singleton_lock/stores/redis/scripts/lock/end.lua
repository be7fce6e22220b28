-- Ends a hold, before free.lua does the rest: in most cases there is no rest, with no record, or nothing but a record.
-- Rare keys and arguments are left out, as in request.lua.
-- KEYS waiting, wake, [record (if record ms is not 0),] [messages that are over, more of them, aside (see now.lua; all three if there is a name,
--      or a reservation),] [slots, record of the message that it is reserved for, more messages that are over, for that one (all three if there is
--      a reservation),] lock... (one lock, or the slots of a semaphore), over...
-- ARGV owner, wake ms (0: wake nobody); and the following, up to the last that differs from its default:
--      record, record ms (0: no record), name of the message among those that are over ('': it is not asked for),
--      ms for which it is to be one (0: the record alone says that),
--      repeated (1: this was not answered before, and may have been carried out; needs the name; 0),
--      value of the reservation, its ms (0: no reservation), name of the message that it is reserved for,
--      over ms, limit (1), locks that are named (1)
-- -> 1 freed | 2 freed, and a waiter is still to be woken (wake ms 0) | 0 no longer held
-- Deletes first: a script whose first write is refused for lack of memory does nothing at all.
local NOT_OURS, FREED, SOMEBODY_WAITS = 0, 1, 2
local owner, wake_ms, record, record_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4] or '0'
local name, ended_ms, repeated = ARGV[5] or '', ARGV[6] or '0', ARGV[7] or '0'
local reserved, reserved_ms, name_of_next = ARGV[8], ARGV[9] or '0', ARGV[10]
local over_ms, limit, locks = ARGV[11], ARGV[12] or '1', tonumber(ARGV[13] or 1)

local waiting, wake, FIRST = KEYS[1], KEYS[2], 3
local done, ended, more, aside, in_use, done_of_next, more_of_next
if record_ms ~= '0' then
  done, FIRST = KEYS[FIRST], FIRST + 1
end
if name ~= '' or reserved_ms ~= '0' then
  ended, more, aside, FIRST = KEYS[FIRST], KEYS[FIRST + 1], KEYS[FIRST + 2], FIRST + 3
end
if reserved_ms ~= '0' then
  in_use, done_of_next, more_of_next, FIRST = KEYS[FIRST], KEYS[FIRST + 1], KEYS[FIRST + 2], FIRST + 3
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
