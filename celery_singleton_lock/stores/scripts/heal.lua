-- Renewal on one node of a Redlock.
-- KEYS lock, over, ...  ARGV owner, value to put back ('': do not), ttl ms, ... (three for each pair of keys)
-- -> {1 | 0 | 2, ...}: 1 renewed, 0 no longer ours, 2 was missing and is ours again: good for the next round, no vote in
-- this one. Not for an owner that has released meanwhile.
local renewed = {}
for i = 1, #KEYS / 2 do
  local lock, over = KEYS[2 * i - 1], KEYS[2 * i]
  local owner, put_back, ttl = ARGV[3 * i - 2], ARGV[3 * i - 1], ARGV[3 * i]
  local value = redis.pcall('GET', lock)
  if type(value) == 'string' and string.sub(value, 1, #owner) == owner then
    renewed[i] = redis.call('PEXPIRE', lock, ttl)
  elseif not value and put_back ~= '' and redis.call('EXISTS', over) == 0 then
    redis.call('SET', lock, put_back, 'PX', ttl)
    renewed[i] = 2
  else
    renewed[i] = 0
  end
end
return renewed
