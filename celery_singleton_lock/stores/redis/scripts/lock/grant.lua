-- How a lock is given; KEYS and ARGV are those of request.lua.
-- Follows now.lua.
-- The value of a hold: beside the owner the holder, and behind that the fence.
local function value_with(number)
  return ARGV[1] .. string.sub(ARGV[3], 1, -2) .. string.format(',%.0f]', number)
end

-- -> the highest fence that was given out; 0 where nothing is known of that, or it is a value of somebody else
local function highest_fence()
  local value = redis.pcall('GET', KEYS[1])
  local number = type(value) == 'string' and tonumber(value) or 0
  return number > 0 and number < 2^53 and number or 0
end

-- -> the fence
local function grant(lock, seed)
  local fence, request, fence_ttl = KEYS[1], KEYS[6], ARGV[5]
  -- The time in microseconds is above every fence given before the highest one was lost (restart, flush, expiry, a value of
  -- somebody else), or went back (a restart with older data, a replica that has missed the last ones).
  local time = seed or now(request)
  local number = math.max(highest_fence() + 1, time)
  if number > time and not seed then
    -- The clock was set back: it is not to be lost before that has caught up.
    fence_ttl = string.format('%.0f', fence_ttl + (number - time) / 1000)
  end
  redis.call('SET', fence, string.format('%.0f', number), 'PX', fence_ttl)
  redis.call('SET', lock, value_with(number), 'PX', ARGV[4])
  return number
end
