-- The holds of a lock. One that only one may hold is a value that begins with the owner; if more may, a sorted set of such values, by when each
-- ends (ms since the epoch), and lasts as long as the last of them. One that was taken under a limit of 1 becomes an element of the set when another
-- one comes beside it. Few functions: each costs every call a fifth of a microsecond.
-- Follows now.lua.
local HOLD = '^%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%['

-- OWNER_LENGTH: what follows in a value is the holder, an array: `Holder.dumps`. The others: places in it.
local OWNER_LENGTH, RETRIES, PID, REPLACED, TTL, FENCE, ORDER, NEWER = 32, 3, 5, 7, 9, 10, 12, 13

-- -> the holder in a value; an empty table if somebody else wrote it
local function holder_of(value)
  local readable, fields = pcall(cjson.decode, string.sub(value, OWNER_LENGTH + 1))
  return readable and type(fields) == 'table' and fields or {}
end

local function begins_with(value, beginning)
  return string.sub(value, 1, #beginning) == beginning
end

-- -> the values; for each the ms that it lasts; whether they are in a set
local function holds_of(lock)
  local value = redis.pcall('GET', lock)
  if not value then
    return {}, {}, false
  elseif type(value) == 'string' then
    return {value}, {redis.call('PTTL', lock)}, false
  end
  local elements, time, values, lasts = redis.call('ZRANGE', lock, 0, -1, 'WITHSCORES'), math.floor(now() / 1000), {}, {}
  for i = 1, #elements, 2 do
    assert(string.find(elements[i], HOLD), 'WRONGTYPE the set at ' .. lock .. ' is not a lock')
    local left = elements[i + 1] - time
    if left > 0 then
      values[#values + 1], lasts[#lasts + 1] = elements[i], left
    end
  end
  return values, lasts, true
end

-- By the key of a lock, what `holds_of` gives: it is read once, although a call may renew many of its holds.
local known = {}

-- Of a hold whose value begins like this; never an error: what others have written is no hold.
-- -> the value; the ms that it lasts; whether it is in a set; nothing if there is none
local function hold_of(lock, beginning)
  known[lock] = known[lock] or {pcall(holds_of, lock)}
  local readable, values, lasts, is_set = unpack(known[lock])
  for i, value in ipairs(readable and values or {}) do
    if begins_with(value, beginning) then
      return value, lasts[i], is_set
    end
  end
end

-- Writes a hold (nil: none) in place of `old` (nil: of none). The first write to a set is never refused for lack of memory.
local function put(lock, old, value, ttl, is_set)
  if not is_set then
    if value then
      redis.call('SET', lock, value, 'PX', ttl)
    else
      redis.call('DEL', lock)
    end
    return
  end
  local time = math.floor(now() / 1000)
  redis.call('ZREMRANGEBYSCORE', lock, '-inf', string.format('%.0f', time))
  if old and old ~= value then
    redis.call('ZREM', lock, old)
  end
  if value then
    redis.call('ZADD', lock, string.format('%.0f', time + ttl), value)
  end
  local last = redis.call('ZRANGE', lock, -1, -1, 'WITHSCORES')[2]
  if last then
    redis.call('PEXPIREAT', lock, string.format('%.0f', math.min(last, 2^53)))
  end
end
