-- Follows holds.lua.
-- By the keys of those locks whose holds are in a set, these holds by their owners: it is read once, although a call may renew many of them.
local sets = {}

-- Of a hold whose value begins like this, with its owner; never an error: what others have written is no hold.
-- -> the value; the ms that it lasts, if it is in a set; whether it is
local function hold_of(lock, beginning)
  local found, left = redis.pcall('GET', lock)
  local is_set = type(found) == 'table'
  if is_set and not sets[lock] then
    local readable, values, lasts = pcall(holds_of, lock)
    sets[lock] = {}
    for i, value in ipairs(readable and values or {}) do
      sets[lock][string.sub(value, 1, 32)] = {value, lasts[i]}
    end
  end
  if is_set then
    found, left = unpack(sets[lock][string.sub(beginning, 1, 32)] or {})
  end
  return found and string.sub(found, 1, #beginning) == beginning and found, left, is_set
end
