-- Frees a lock; remembers a record, reserves the lock, gives the owner up, as asked.
-- Follows end.lua, which has ended the hold and names the KEYS and ARGV.
local OWNER_LENGTH = 32

-- -> whether a record says that all that follows from its message was sent; the shortest records are a number (outcome.py)
local function is_settled(text)
  local readable, fields = pcall(cjson.decode, string.match(text, '^[^\n]*'))
  return readable and (type(fields) == 'number' or type(fields) == 'table' and fields[4] == true)
end

if #KEYS >= FIRST + locks then
  -- Nor does it wait any more: nobody is to pass a wake-up on to it.
  redis.pcall('ZADD', waiting, 'XX', 0, string.sub(owner, 1, OWNER_LENGTH))
end
for i = FIRST + locks, #KEYS do
  -- An error if that is refused (a replica; no memory, if nothing was deleted): it is not given up then, and this is repeated.
  redis.call('SET', KEYS[i], 1, 'PX', over_ms)
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
  redis.call('SET', ours, reserved, 'PX', reserved_ms)
  local left = redis.call('PTTL', in_use)
  if left > 0 and left < tonumber(reserved_ms) then
    redis.call('PEXPIRE', in_use, reserved_ms)
  end
end
if somebody_waits then
  if wake_ms == '0' then
    return SOMEBODY_WAITS
  end
  -- pcall: somebody else's value may be there; the rest is done.
  local length = redis.pcall('RPUSH', wake, 1)
  if type(length) == 'number' and length > tonumber(limit) then
    redis.call('LTRIM', wake, -limit, -1)
  end
  redis.call('PEXPIRE', wake, wake_ms)
end
return FREED
