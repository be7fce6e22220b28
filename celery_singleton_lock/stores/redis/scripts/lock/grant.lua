-- How a lock is given; KEYS and ARGV are those of request.lua.
-- Follows now.lua.
-- The value of a hold: beside the owner the holder, and behind that the fence.
local function value_with(number)
  return ARGV[1] .. string.sub(ARGV[3], 1, -2) .. string.format(',%.0f]', number)
end

-- -> the fence
local function grant(lock, seed)
  local fence, request = KEYS[1], KEYS[6]
  local highest = redis.pcall('GET', fence)
  -- The time in microseconds is above every fence given before the highest one was lost (restart, flush, expiry, a value of
  -- somebody else), or went back (a restart with older data, a replica that has missed the last ones).
  local number = math.max((type(highest) == 'string' and tonumber(highest) or 0) + 1, seed or now(request))
  redis.call('SET', fence, string.format('%.0f', number), 'PX', ARGV[5])
  redis.call('SET', lock, value_with(number), 'PX', ARGV[4])
  return number
end
