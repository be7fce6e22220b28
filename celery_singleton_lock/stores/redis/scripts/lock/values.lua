-- KEYS lock...
-- -> {value | '', ...}: what is there, for nodes of a Redlock that have lost it
local values = {}
for i, lock in ipairs(KEYS) do
  local value = redis.pcall('GET', lock)
  values[i] = type(value) == 'string' and value or ''
end
return values
