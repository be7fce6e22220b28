-- Follows now.lua.
-- KEYS lock
-- -> how many hold it, see holds.lua
local held = redis.pcall('ZCOUNT', KEYS[1], string.format('(%.0f', math.floor(now() / 1000)), '+inf')
return type(held) == 'number' and held or 1
