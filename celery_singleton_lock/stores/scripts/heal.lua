-- Renewal on one node of a Redlock.
-- KEYS lock, over, ...  ARGV owner, ttl ms, ... (a pair for each pair of keys)
-- -> {1 | 0 | 2, ...}: 1 renewed, 0 no longer ours, 2 was missing and is ours again: good for the next round, no vote in
-- this one. Not for an owner that has released meanwhile.
local renewed = {}
for i = 1, #KEYS, 2 do
  local lock, over, owner, ttl = KEYS[i], KEYS[i + 1], ARGV[i], ARGV[i + 1]
  local value, answer = redis.pcall('GET', lock), 0
  if type(value) == 'string' and string.sub(value, 1, #owner) == owner then
    answer = redis.call('PEXPIRE', lock, ttl)
  elseif not value and redis.call('EXISTS', over) == 0 then
    redis.call('SET', lock, owner, 'PX', ttl)
    answer = 2
  end
  renewed[#renewed + 1] = answer
end
return renewed
