-- The server's time in microseconds since the epoch. TIME lies outside of +@read +@write; if it is refused, the id of an
-- element of a stream has the time to the millisecond. The key does not exist before or after.
local function now(key)
  local time = redis.pcall('TIME')
  if not time.err then
    return time[1] * 1000000 + time[2]
  end
  local id = redis.call('XADD', key, '*', 't', '')
  redis.call('DEL', key)
  return tonumber(string.match(id, '^%d+')) * 1000
end
