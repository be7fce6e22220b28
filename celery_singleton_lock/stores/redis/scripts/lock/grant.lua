-- How a lock is given. What is asked comes as arguments: a function that refers to what stands around it costs more than its call.
-- Follows now.lua.
-- -> the highest fence that was given out; 0 where nothing is known of that, or it is a value of somebody else
local function highest_fence(fence)
  local value = redis.pcall('GET', fence)
  local number = type(value) == 'string' and tonumber(value) or 0
  return number > 0 and number < 2^53 and number or 0
end

-- Gives `owner` the lock for `ttl`, with this fence: beside the owner stands the holder, and within that the fence.
local function write(lock, owner, holder, digits, ttl)
  redis.call('SET', lock, owner .. string.gsub(holder, '\n', ',' .. digits, 1), 'PX', ttl)
end

-- -> the fence
local function grant(lock, owner, holder, ttl, fence, fence_ttl, seed, aside)
  -- The time in microseconds is above every fence given before the highest one was lost (restart, flush, expiry, a value of
  -- somebody else), or went back (a restart with older data, a replica that has missed the last ones).
  local time = seed or now(aside)
  local number = math.max(highest_fence(fence) + 1, time)
  if number > time and not seed then
    -- The clock was set back: it is not to be lost before that has caught up.
    fence_ttl = string.format('%.0f', fence_ttl + (number - time) / 1000)
  end
  local digits = string.format('%.0f', number)
  redis.call('SET', fence, digits, 'PX', fence_ttl)
  write(lock, owner, holder, digits, ttl)
  return number
end
