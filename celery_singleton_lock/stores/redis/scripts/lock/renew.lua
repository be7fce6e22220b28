-- Follows holds.lua.
-- KEYS lock...  ARGV owner, ttl ms, ... (a pair for each key; a ttl that begins with '+' does not shorten what is left)
-- -> {1 | id | 0, ...}: 1 renewed, 0 no longer held; the id of a task: renewed, but to end for that task, see newest.lua
-- Never creates a key. A foreign value is "not held", and does not fail the others.
local renewed = {}
for i, lock in ipairs(KEYS) do
  local owner, ttl = ARGV[2 * i - 1], ARGV[2 * i]
  renewed[i] = 0
  local value, left, is_set = hold_of(lock, owner)
  if value then
    if string.sub(ttl, 1, 1) == '+' then
      ttl = math.max(tonumber(ttl), left)
    end
    if is_set then
      put(lock, value, value, ttl, true)
      renewed[i] = 1
    else
      renewed[i] = redis.call('PEXPIRE', lock, ttl)
    end
    if string.sub(value, -2) == ']]' then
      local newer = holder_of(value)[NEWER]
      if type(newer) == 'table' and type(newer[2]) == 'string' then
        renewed[i] = newer[2]
      end
    end
  end
end
return renewed
