-- KEYS done, slots, lock... (one lock, or the slots of a semaphore)
-- ARGV record, record ms, heir ('' where there is none), sending (how the holder of a copy begins, behind the 32
--      characters of the owner), retries, replaced
-- -> {1} recorded | {0, value, pttl, slot} another copy of the message has the lock | {2, record, pttl} it was carried out
--  | {5, slots} so many are in use: name them all
-- Idempotent by the record: what a repeated call finds is its own. One that begins with '?' is a promise, on one node of a
-- Redlock: it keeps others from recording anything, and is replaced by its own record.
local done, in_use = KEYS[1], KEYS[2]
local record, heir, sending = ARGV[1], ARGV[3], ARGV[4]

local known = redis.pcall('GET', done)
if known == record or type(known) == 'string' and record == '?' .. known then
  return {1}
elseif type(known) == 'string' and known ~= '?' .. record then
  return {2, known, redis.call('PTTL', done)}
end
local count = tonumber(redis.call('GET', in_use) or nil)
if count and count > #KEYS - 2 then
  return {5, count}
end
for i = 3, #KEYS do
  local value = redis.pcall('GET', KEYS[i])
  if type(value) == 'string' then
    local is_copy = heir ~= '' and string.sub(value, 1, #heir) == heir
    if sending ~= '' and string.sub(value, 33, 32 + #sending) == sending then
      local readable, fields = pcall(cjson.decode, string.sub(value, 33))
      is_copy = is_copy or readable and fields[3] == tonumber(ARGV[5]) and fields[7] == tonumber(ARGV[6])
    end
    if is_copy then
      return {0, value, redis.call('PTTL', KEYS[i]), i - 3}
    end
  end
end
redis.call('SET', done, record, 'PX', ARGV[2])
return {1}
