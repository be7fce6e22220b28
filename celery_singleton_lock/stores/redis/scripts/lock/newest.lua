-- Of the messages of an order only the newest runs: the last one that came. They are ordered by when they first came, however often their
-- copies ask.
-- Follows request.lua, now.lua and holds.lua. KNOWN: the most messages that an order has, the newest ones.
-- -> the number of this message in the order; the newest of all, if that is another one; the newest before this one, if this one has just come
local KNOWN = 1000
local function arrive()
  local number = redis.pcall('ZSCORE', order, order_member)
  if type(number) == 'table' then
    redis.call('DEL', order) -- A value of somebody else.
    number = false
  end
  local last = redis.call('ZRANGE', order, -1, -1, 'WITHSCORES')
  local before, highest = last[1], tonumber(last[2] or 0)
  local is_new = not number and not arrived
  if not number then
    -- The time: higher than all numbers that were given before the order was lost. And higher than the last fence, which may be the number of a
    -- message that has not asked: fences are ahead of a clock that was set back. A number that a message claims counts for no more than that.
    local given = redis.pcall('GET', fence)
    local next_number = math.max(highest + 1, now(), (type(given) == 'string' and tonumber(given) or 0) + 1)
    number = math.min(arrived or next_number, next_number)
    redis.call('ZADD', order, string.format('%.0f', number), order_member)
    redis.call('ZREMRANGEBYRANK', order, 0, -KNOWN - 1)
  end
  redis.call('PEXPIRE', order, math.max(order_ms, redis.call('PTTL', order)))
  number = tonumber(number)
  return number, number < highest and before, is_new and before
end

-- Has a holder of the lock stop, if it is of the order of which this message is the newest now: from then on, this message is the last part of
-- the holder in the lock's value, and a renewal reports it to the holder (renew.lua). A holder that is to stop already stops for the first message
-- that asked for it.
-- -> the value; whether nobody runs under it: the lock is kept for an older message that waits
local function stop(value, pttl)
  local fields = holder_of(value)
  if fields[ORDER] ~= stops then
    return value, false
  end
  if fields[PID] == 0 then
    return value, true
  end
  if not fields[NEWER] then
    local old = value
    value = string.sub(old, 1, -2) .. ',' .. string.sub(order_member, 1, -2) .. ']]'
    if is_set then
      put(lock, old, value, pttl, true)
    else
      redis.call('SET', lock, value, 'KEEPTTL')
    end
  end
  return value, false
end
