-- The holders of a lock, and waking its waiters.
-- Follows request.lua.
local function holds(slot, whose)
  return string.sub(redis.call('GET', KEYS[FIRST + slot]) or '', 1, #whose) == whose
end

local function is_held_by(whose)
  for slot = 0, slots - 1 do
    if holds(slot, whose) then
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
    redis.pcall('LTRIM', wake, -slots, -1)
    redis.call('PEXPIRE', wake, wake_ms)
  end
end
