-- The holds of a lock. One that only one may hold is a value that begins with the owner; if more may, a sorted set of such values, by when each
-- ends (ms since the epoch), and lasts as long as the last of them. One that was taken under a limit of 1 becomes an element of the set when another
-- one comes beside it.
-- Follows now.lua.
local function is_hold(value)
  local _, last = string.find(value, '^%x+%[')
  return last == 33
end

local function ms()
  return math.floor(now() / 1000)
end

-- -> the values; for each the ms that it lasts; whether they are in a set
local function holds_of(lock)
  local value = redis.pcall('GET', lock)
  if not value then
    return {}, {}, false
  elseif type(value) == 'string' then
    return {value}, {redis.call('PTTL', lock)}, false
  end
  local elements, time, values, lasts = redis.call('ZRANGE', lock, 0, -1, 'WITHSCORES'), ms(), {}, {}
  for i = 1, #elements, 2 do
    assert(is_hold(elements[i]), 'WRONGTYPE the set at ' .. lock .. ' is not a lock')
    local left = elements[i + 1] - time
    if left > 0 then
      values[#values + 1], lasts[#lasts + 1] = elements[i], left
    end
  end
  return values, lasts, true
end

-- The holds in a set, by their owners; it is read once, although a call may renew many of them.
local sets = {}
local function holds_in(lock)
  if not sets[lock] then
    local readable, values, lasts = pcall(holds_of, lock)
    sets[lock] = {}
    for i, value in ipairs(readable and values or {}) do
      sets[lock][string.sub(value, 1, 32)] = {value, lasts[i]}
    end
  end
  return sets[lock]
end

-- Of a hold whose value begins like this, with its owner; never an error: what others have written is no hold.
-- -> the value; the ms that it lasts, if it is in a set; whether it is
local function hold_of(lock, beginning)
  local found, is_set, left = redis.pcall('GET', lock), false
  if type(found) == 'table' then
    found, left = unpack(holds_in(lock)[string.sub(beginning, 1, 32)] or {})
    is_set = true
  end
  return found and string.sub(found, 1, #beginning) == beginning and found, left, is_set
end

local function keep_until_last(lock)
  local last = redis.call('ZRANGE', lock, -1, -1, 'WITHSCORES')[2]
  if last then
    redis.call('PEXPIREAT', lock, string.format('%.0f', math.min(last, 2^53)))
  end
end

-- Writes a hold; in a set, in place of `old`, if there is one. The first write there is never refused for lack of memory.
local function put(lock, value, ttl, is_set, old)
  if is_set then
    local time = ms()
    redis.call('ZREMRANGEBYSCORE', lock, '-inf', string.format('%.0f', time))
    if old and old ~= value then
      redis.call('ZREM', lock, old)
    end
    redis.call('ZADD', lock, string.format('%.0f', time + ttl), value)
    keep_until_last(lock)
  else
    redis.call('SET', lock, value, 'PX', ttl)
  end
end

local function drop(lock, value, is_set)
  if is_set then
    redis.call('ZREM', lock, value)
    keep_until_last(lock)
  else
    redis.call('DEL', lock)
  end
end
