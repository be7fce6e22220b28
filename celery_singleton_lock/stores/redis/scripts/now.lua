-- The server's time in microseconds since the epoch.
local function now()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end
