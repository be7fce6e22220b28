-- Gives `owner` the lock for `ttl`: the value is the owner and then the holder, with the fence inside. The request comes as arguments: a
-- function that refers to variables outside of it costs more than its call, and so does each function.
-- Follows now.lua.
-- -> the fence
local function grant(lock, owner, holder, ttl, fence, fence_ttl, seed, aside)
  -- The time in microseconds is above every fence given before the highest one was lost (restart, flush, expiry, somebody
  -- else's value), or went back (a restart with older data, a replica that has missed the last ones).
  local time, value = seed or now(aside), redis.pcall('GET', fence)
  local highest = type(value) == 'string' and tonumber(value) or 0
  local is_one = highest > 0 and highest < 2^53
  local number = math.max(is_one and highest + 1 or 1, time)
  if number > time and not seed then
    -- The clock was set back: the counter must not be lost before the clock has caught up.
    fence_ttl = string.format('%.0f', fence_ttl + (number - time) / 1000)
  end
  local digits = string.format('%.0f', number)
  redis.call('SET', fence, digits, 'PX', fence_ttl)
  redis.call('SET', lock, owner .. string.gsub(holder, '\n', ',' .. digits, 1), 'PX', ttl)
  return number
end
