-- The holders of the lock that is asked for, and waking its waiters.
-- Follows request.lua and holds.lua.
local values, lasts, is_set = holds_of(lock)

local function begins_with(value, beginning)
  return string.sub(value, 1, #beginning) == beginning
end

local function is_held_by(whose)
  for _, value in ipairs(values) do
    if begins_with(value, whose) then
      return true
    end
  end
  return false
end

local function wake_others(places)
  -- A waiter that was not named is not woken, and looks by itself.
  if places > 0 and waiting and redis.call('EXISTS', waiting) == 1 then
    for _ = 1, places do
      redis.pcall('RPUSH', wake, 1)
    end
    redis.pcall('LTRIM', wake, -limit, -1)
    redis.call('PEXPIRE', wake, wake_ms)
  end
end
