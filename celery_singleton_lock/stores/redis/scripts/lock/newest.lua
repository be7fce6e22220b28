-- Of some messages of a key only the newest is to run: the last one that came. What orders them is when they came first, each once, however
-- often its copies ask.
-- Follows request.lua, now.lua and places.lua. KNOWN: messages that the order has at most, the newest.
-- -> the number of this message in the order; the newest of them all, if that is another one; the newest before this, if this has come just now
local KNOWN = 1000
local function arrive()
  local number = redis.pcall('ZSCORE', order, arrives_as)
  if type(number) == 'table' then
    redis.call('DEL', order) -- A value of somebody else.
    number = false
  end
  local last = redis.call('ZRANGE', order, -1, -1, 'WITHSCORES')
  local before, highest = last[1], tonumber(last[2] or 0)
  local is_new = not number and not arrived
  if not number then
    -- The time: higher than all that were given before the order was lost. What a message says it has counts for no more than that.
    local time = now(request)
    number = arrived and math.min(arrived, time) or math.max(highest + 1, time)
    redis.call('ZADD', order, string.format('%.0f', number), arrives_as)
    redis.call('ZREMRANGEBYRANK', order, 0, -KNOWN - 1)
  end
  redis.call('PEXPIRE', order, order_ms)
  number = tonumber(number)
  return number, number < highest and before, is_new and before
end

-- Has the holder of the lock stop, if it is of the order of which this message is the newest now: behind all that its value says
-- of the holder stands the message from then on, which the holder is told as it renews (renew.lua). A holder that is to stop already does it for the
-- first that has said so.
-- -> the value; whether nobody runs under it: the lock is kept for the next attempt of an older message
local function stop(lock, value)
  local readable, fields = pcall(cjson.decode, string.sub(value, #owner + 1))
  if not readable or type(fields) ~= 'table' or fields[12] ~= stops then
    return value, false
  end
  if fields[9] == 0 then
    return value, true
  end
  if not fields[13] then
    value = string.sub(value, 1, -2) .. ',' .. string.sub(arrives_as, 1, -2) .. ']]'
    redis.call('SET', lock, value, 'KEEPTTL')
  end
  return value, false
end
