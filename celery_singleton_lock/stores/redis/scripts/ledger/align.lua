-- KEYS ledger, gone...  ARGV lifetime ms, ceiling, (entry, last)... (a gone and a pair for each)
-- -> {last, ...}: what is known of each entry; if that is nothing, what was given, or what was known before the entry was
-- removed if that is later; it is known from now on. 0 if 0 was given: nothing is known from then on.
-- Nothing beyond the ceiling is believed: a clock was wrong.
local ledger, lifetime, ceiling = KEYS[1], ARGV[1], tonumber(ARGV[2])
local found = {}
for i = 3, #ARGV, 2 do
  local entry, last = ARGV[i], ARGV[i + 1]
  local known = tonumber(redis.call('HGET', ledger, entry) or nil)
  if not known or known > ceiling then
    known = tonumber(last)
    if known == 0 then
      redis.call('HDEL', ledger, entry)
    else
      -- pcall: a value of another type is somebody else's.
      local gone = redis.pcall('GET', KEYS[(i + 1) / 2])
      local before = tonumber(gone or nil)
      if before and before > known and before <= ceiling then
        known, last = before, gone
      end
      redis.call('HSET', ledger, entry, last)
    end
  end
  found[#found + 1] = known
end
redis.call('PEXPIRE', ledger, lifetime)
return found
