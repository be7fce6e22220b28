-- KEYS ledger, tombstone, claim...  ARGV owner, lifetime ms, ceiling, tombstone ms (0: none), (entry, last)... (a pair for each claim; last 0: not sent)
-- -> 1
-- Records what was sent, and ends the claims; if there is to be a tombstone, late requests of the owner claim nothing any more. A last run never goes back.
local ledger, owner, ceiling = KEYS[1], ARGV[1], tonumber(ARGV[3])
for i = 3, #KEYS do
  local entry, last = ARGV[2 * i - 1], ARGV[2 * i]
  local known = tonumber(redis.call('HGET', ledger, entry) or nil)
  if last ~= '0' and (not known or known < tonumber(last) or known > ceiling) then
    redis.call('HSET', ledger, entry, last)
  end
  if redis.pcall('GET', KEYS[i]) == owner then
    redis.call('DEL', KEYS[i])
  end
end
redis.call('PEXPIRE', ledger, ARGV[2])
if ARGV[4] ~= '0' then
  redis.call('SET', KEYS[2], 1, 'PX', ARGV[4])
end
return 1
