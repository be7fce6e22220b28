-- Gives `owner` the lock for `ttl`: beside the owner stands the holder, and within that the fence. What is asked comes as arguments: a
-- function that refers to what stands around it costs more than its call, and so does each function.
-- Follows now.lua.
-- -> the fence
local function grant(lock, owner, holder, ttl, fence, fence_ttl, seed, aside)
  -- The time in microseconds is above every fence given before the highest one was lost (restart, flush, expiry, a value of
  -- somebody else), or went back (a restart with older data, a replica that has missed the last ones).
  local time, value = seed or now(aside), redis.pcall('GET', fence)
  local highest = type(value) == 'string' and tonumber(value) or 0
  local is_one = highest > 0 and highest < 2^53
  local number = math.max(is_one and highest + 1 or 1, time)
  if number > time and not seed then
    -- The clock was set back: it is not to be lost before that has caught up.
    fence_ttl = string.format('%.0f', fence_ttl + (number - time) / 1000)
  end
  local digits = string.format('%.0f', number)
  redis.call('SET', fence, digits, 'PX', fence_ttl)
  redis.call('SET', lock, owner .. string.gsub(holder, '\n', ',' .. digits, 1), 'PX', ttl)
  return number
end
