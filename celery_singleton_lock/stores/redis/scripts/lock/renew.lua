-- KEYS lock...  ARGV owner, ttl ms, ... (a pair for each key; owner '': the key that says how many slots are in use)
-- -> {1 | 0, ...}: 1 renewed, 0 no longer ours
-- Never creates a key. pcall: a foreign value of another type is "not ours", and no reason to fail the others.
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
      renewed[i] = redis.call('PEXPIRE', lock, ttl)
    end
  end
end
return renewed
