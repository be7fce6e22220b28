-- The server's time in microseconds since the epoch.
local function now()
  local time = redis.pcall('TIME')
  assert(not time.err, 'the user of the locks needs the right +time')
  return time[1] * 1000000 + time[2]
end
