-- Records that a message is not carried out, unless it is being, or was, carried out.
-- Follows answers.lua and holds.lua.
-- KEYS record[, lock]
-- ARGV nothing, to look only; or record, record ms, owner under which the lock may be reserved for it ('': none), sending (how the holder of a copy
--      begins, behind the 32 characters of the owner), retries, replaced, [the promise that the record takes the place of]
-- -> {GRANTED} recorded, or nothing is known | {HELD, value, pttl} another copy of the message has the lock
--  | {RECORD, record, pttl} it was carried out | {GIVEN_UP} the promise was taken back, or has expired
-- Idempotent by the record: a repeated call finds its own. '?', eight characters that name the call, and a record are a
-- promise, on one node of a Redlock: it keeps others from recording anything, and the record that it promises replaces it.
local done, lock = KEYS[1], KEYS[2]
local PROMISED = '^%?........(.*)$'
local record, record_ms, reserved_as, sending, retries, replaced, promise = ARGV[1] or '', unpack(ARGV, 2)

local known = redis.pcall('GET', done)
if known == record or type(known) == 'string' and string.match(record, PROMISED) == known then
  return {GRANTED}
elseif type(known) == 'string' and string.match(known, PROMISED) ~= record then
  return {RECORD, known, redis.call('PTTL', done)}
elseif promise and known ~= promise then
  return {GIVEN_UP}
elseif record == '' then
  return {GRANTED}
end
local is_lock, values, lasts = pcall(holds_of, lock)
for i, value in ipairs(is_lock and values or {}) do
  local is_copy = reserved_as ~= '' and begins_with(value, reserved_as)
  if sending ~= '' and string.sub(value, OWNER_LENGTH + 1, OWNER_LENGTH + #sending) == sending then
    local fields = holder_of(value)
    is_copy = is_copy or fields[RETRIES] == tonumber(retries) and fields[REPLACED] == tonumber(replaced)
  end
  if is_copy then
    return {HELD, value, lasts[i]}
  end
end
redis.call('SET', done, record, 'PX', record_ms)
return {GRANTED}
