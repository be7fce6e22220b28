-- KEYS lock...  ARGV owner, ttl ms, ... (a pair for each key; owner '': the key that says how many slots are in use; a ttl that begins
--      with '+' does not shorten what is left)
-- -> {1 | id | 0, ...}: 1 renewed, 0 no longer held; the id of a task: renewed, but to end for that task, see newest.lua
-- Never creates a key. pcall: a foreign value of another type is "not held", and must not fail the others.
local OWNER_LENGTH, NEWER = 32, 13
local renewed = {}
for i, lock in ipairs(KEYS) do
  local owner, ttl = ARGV[2 * i - 1], ARGV[2 * i]
  renewed[i] = 0
  if owner == '' then
    -- Others may need it for longer.
    local left = redis.call('PTTL', lock)
    if left > 0 and left < tonumber(ttl) then
      redis.call('PEXPIRE', lock, ttl)
    end
  else
    local value = redis.pcall('GET', lock)
    if type(value) == 'string' and string.sub(value, 1, #owner) == owner then
      if string.sub(ttl, 1, 1) == '+' then
        ttl = math.max(tonumber(ttl), redis.call('PTTL', lock))
      end
      renewed[i] = redis.call('PEXPIRE', lock, ttl)
      if string.sub(value, -2) == ']]' then
        local readable, fields = pcall(cjson.decode, string.sub(value, OWNER_LENGTH + 1))
        local newer = readable and type(fields) == 'table' and fields[NEWER]
        if type(newer) == 'table' and type(newer[2]) == 'string' then
          renewed[i] = newer[2]
        end
      end
    end
  end
end
return renewed
