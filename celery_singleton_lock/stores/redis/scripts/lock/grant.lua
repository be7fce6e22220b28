-- Gives `owner` the lock for `ttl`: the value is the owner and then the holder, with the fence inside. The request comes as arguments: a
-- function that refers to variables outside of it costs more than its call, and so does each function.
-- Follows now.lua.
-- -> the fence
local function grant(lock, owner, holder, ttl, fence, fence_ttl, seed)
  -- The time in microseconds is above every fence given before the highest one was lost (restart, flush, expiry, somebody
  -- else's value), or went back (a restart with older data, a replica that has missed the last ones).
  local number = seed or now()
  local digits = string.format('%.0f', number)
  -- One command in most cases: the highest one is below the time.
  local value = redis.pcall('SET', fence, digits, 'PX', fence_ttl, 'GET')
  local highest = type(value) == 'string' and tonumber(value) or 0
  if type(value) == 'table' then
    redis.call('SET', fence, digits, 'PX', fence_ttl) -- A value of another type was there, and still is.
  elseif highest >= number and highest < 2^53 then
    if not seed then
      -- The clock was set back: the counter must not be lost before the clock has caught up, and gone as far beyond.
      fence_ttl = string.format('%.0f', fence_ttl + (highest + 1 - number) / 1000)
    end
    number = highest + 1
    digits = string.format('%.0f', number)
    redis.call('SET', fence, digits, 'PX', fence_ttl)
  end
  redis.call('SET', lock, owner .. string.gsub(holder, '\n', ',' .. digits, 1), 'PX', ttl)
  return number
end
