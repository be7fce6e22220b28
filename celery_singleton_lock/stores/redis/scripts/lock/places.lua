-- The holders of the lock that is asked for.
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
