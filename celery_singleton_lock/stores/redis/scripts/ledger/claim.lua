-- KEYS ledger, tombstone, claim, gone  ARGV owner, ttl ms, ceiling, entry, last
-- -> {CLAIMED} | {SENT, last} meanwhile | {CLAIMED_BY_ANOTHER, pttl, its owner}: `ledger.Claim`
-- A claim is for the tick that follows `last`. Idempotent by owner.
local CLAIMED_BY_ANOTHER, CLAIMED, SENT = 0, 1, 2
local ledger, tombstone, claim, gone = unpack(KEYS)
local owner, ttl, ceiling, entry, last = unpack(ARGV)
local known = tonumber(redis.call('HGET', ledger, entry) or redis.pcall('GET', gone) or nil)
if known and known > tonumber(last) and known <= tonumber(ceiling) then
  return {SENT, known}
end
-- pcall: a value of another type is somebody else's and not a claim, and must not keep the entry from being claimed.
local claimer = redis.pcall('GET', claim)
claimer = type(claimer) == 'string' and claimer
-- If the owner has a tombstone, it was given up, and nobody waits for this any more.
if redis.call('EXISTS', tombstone) == 1 or claimer and claimer ~= owner then
  local left = redis.call('PTTL', claim)
  -- A value that never ends is somebody else's: do not ask for it all the time.
  return {CLAIMED_BY_ANOTHER, left >= 0 and left or tonumber(ttl), claimer or ''}
end
redis.call('SET', claim, owner, 'PX', ttl)
return {CLAIMED}
