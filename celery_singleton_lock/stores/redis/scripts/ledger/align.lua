-- KEYS ledger  ARGV lifetime ms, ceiling, (entry, last)...
-- -> {last, ...}: what is known of each entry; if that is nothing, what was given, which is known from now on unless it
-- is 0
-- Nothing beyond the ceiling is believed: a clock was wrong.
local ledger, lifetime, ceiling = KEYS[1], ARGV[1], tonumber(ARGV[2])
local found = {}
for i = 3, #ARGV, 2 do
  local entry, last = ARGV[i], ARGV[i + 1]
  local known = tonumber(redis.call('HGET', ledger, entry) or nil)
  if not known or known > ceiling then
    if last == '0' then
      redis.call('HDEL', ledger, entry)
    else
      redis.call('HSET', ledger, entry, last)
    end
    known = tonumber(last)
  end
  found[#found + 1] = known
end
redis.call('PEXPIRE', ledger, lifetime)
return found
