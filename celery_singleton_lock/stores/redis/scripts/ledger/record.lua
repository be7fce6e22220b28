-- KEYS ledger, claim...  ARGV owner, lifetime ms, ceiling, (entry, last)... (a pair for each claim; last 0: not sent)
-- -> 1
-- Records what was sent, and ends the claims. A last run never goes back.
local owner, ceiling = ARGV[1], tonumber(ARGV[3])
for i = 2, #KEYS do
  local entry, last = ARGV[2 * i], ARGV[2 * i + 1]
  local known = tonumber(redis.call('HGET', KEYS[1], entry) or nil)
  if last ~= '0' and (not known or known < tonumber(last) or known > ceiling) then
    redis.call('HSET', KEYS[1], entry, last)
  end
  if redis.pcall('GET', KEYS[i]) == owner then
    redis.call('DEL', KEYS[i])
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
