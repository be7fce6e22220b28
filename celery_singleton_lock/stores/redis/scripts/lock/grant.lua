-- The fencing token of a new holder, as digits: above all that were given before. What it needs comes as arguments: a function that refers to variables
-- outside of it costs more than its call.
-- Follows now.lua.
local function next_fence(fence, fence_ttl, seed)
  -- The time in microseconds is above every fence given before the highest one was lost (restart, flush, expiry, somebody
  -- else's value), or went back (a restart with older data, a replica that has missed the last ones).
  local number, known = seed or now(), redis.pcall('GET', fence)
  local highest = type(known) == 'string' and tonumber(known) or 0
  if highest >= number and highest < 2^53 then
    if not seed then
      -- The clock was set back: the counter must not be lost before the clock has caught up, and gone as far beyond.
      fence_ttl = fence_ttl + (highest - number) / 1000
    end
    number = highest + 1
  end
  local digits = string.format('%.0f', number)
  redis.call('SET', fence, digits, 'PX', string.format('%.0f', fence_ttl))
  return digits
end
