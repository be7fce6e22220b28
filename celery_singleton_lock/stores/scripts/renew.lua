-- KEYS lock...  ARGV owner, ttl ms, ... (a pair for each key)
-- -> {1 | 0, ...}: 1 renewed, 0 no longer ours
-- Never creates a key. pcall: a foreign value of another type is "not ours", and no reason to fail the others.
local renewed = {}
for i, lock in ipairs(KEYS) do
  local owner, ttl = ARGV[2 * i - 1], ARGV[2 * i]
  local value = redis.pcall('GET', lock)
  if type(value) == 'string' and string.sub(value, 1, #owner) == owner then
    renewed[i] = redis.call('PEXPIRE', lock, ttl)
  else
    renewed[i] = 0
  end
end
return renewed
