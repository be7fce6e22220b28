-- Frees a lock; remembers a record, reserves the lock, gives the owner up, as asked.
-- Follows holds.lua and line.lua. Rare keys and arguments are left out, as in request.lua.
-- KEYS waiting, asked, [record (if record ms is not 0),] [record of the message that it is reserved for (if there is a reservation),]
--      lock, [tombstone (if tombstone ms is not 0)]
-- ARGV owner; and the following, up to the last that is neither 0 nor empty:
--      wakes (1: a waiter), record, record ms (0: no record), repeated (1: this was not answered before, and may have been carried out),
--      value of the reservation, its ms (0: no reservation), tombstone ms
-- -> 1 freed | the waiter to wake: freed | 0 no longer held
-- Deletes first: a script whose first write is refused for lack of memory does nothing at all.
local NOT_OURS, FREED = 0, 1
local owner, wakes, record, record_ms = ARGV[1], ARGV[2] == '1', ARGV[3], ARGV[4] or '0'
local repeated, reserved, reserved_ms = ARGV[5] or '0', ARGV[6], ARGV[7] or '0'
local tombstone_ms = ARGV[8]

local waiting, asked, FIRST = KEYS[1], KEYS[2], 3
local done, done_of_next
if record_ms ~= '0' then
  done, FIRST = KEYS[FIRST], FIRST + 1
end
if reserved_ms ~= '0' then
  done_of_next, FIRST = KEYS[FIRST], FIRST + 1
end

local lock, tombstone = KEYS[FIRST], KEYS[FIRST + 1]
local ours, _, is_set = hold_of(lock, owner)
if ours then
  put(lock, ours, nil, 0, is_set)
end
local somebody_waits = ours and wakes and redis.call('EXISTS', waiting) == 1

-- -> whether a record says that all that follows from its message was sent; the shortest records are a number (ends.py)
local function is_settled(text)
  local readable, fields = pcall(cjson.decode, string.match(text, '^[^\n]*'))
  return readable and (type(fields) == 'number' or type(fields) == 'table' and fields[4] == true)
end

if tombstone then
  -- An error if that is refused (a replica; no memory, if nothing was deleted): it is not given up then, and this is repeated.
  redis.call('SET', tombstone, 1, 'PX', tombstone_ms)
end
if record_ms ~= '0' then
  -- Even if the lock is no longer held: the message was carried out all the same. Nothing was deleted then, and a lack of
  -- memory is an error here: the call is repeated.
  if not redis.call('SET', done, record, 'PX', record_ms, 'NX') then
    local there = redis.pcall('GET', done)
    if type(there) ~= 'string' or string.sub(there, 1, 1) == '?' then
      redis.call('SET', done, record, 'PX', record_ms)
    elseif there == record then
      -- Maybe from a try that waited at the server, and got its whole time.
      if repeated == '0' or redis.call('PTTL', done) > tonumber(record_ms) then
        redis.call('PEXPIRE', done, record_ms)
      end
    elseif repeated == '0' and (is_settled(record) or not is_settled(there)) then
      -- Otherwise what is there is newer: this may be the first of several tries, arriving last.
      redis.call('SET', done, record, 'PX', record_ms)
    end
  end
end
if not ours then
  return NOT_OURS
end
-- If the message that it is reserved for has been carried out meanwhile, it does not come again.
if reserved_ms ~= '0' and (done_of_next == done or redis.call('EXISTS', done_of_next) == 0) then
  put(lock, nil, reserved, tonumber(reserved_ms), is_set)
end
return somebody_waits and next_waiter(waiting, asked) or FREED
