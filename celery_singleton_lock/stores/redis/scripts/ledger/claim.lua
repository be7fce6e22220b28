-- KEYS ledger, over, claim..., gone...  ARGV owner, ttl ms, ceiling, (entry, last)... (a claim, a gone and a pair for each)
-- -> {{CLAIMED, 0} | {SENT, last} meanwhile | {CLAIMED_BY_ANOTHER, pttl}, ...}: `ledger.Claim`
-- A claim is for the tick that follows `last`. Idempotent by owner.
local CLAIMED_BY_ANOTHER, CLAIMED, SENT = 0, 1, 2
local owner, ttl, ceiling = ARGV[1], ARGV[2], tonumber(ARGV[3])
local found, count = {}, (#KEYS - 2) / 2
-- The owner was given up, and nobody waits for this any more.
local over = redis.call('EXISTS', KEYS[2]) == 1
for i = 1, count do
  local entry, last, key = ARGV[2 + 2 * i], tonumber(ARGV[3 + 2 * i]), KEYS[2 + i]
  local known = tonumber(redis.call('HGET', KEYS[1], entry) or redis.pcall('GET', KEYS[2 + count + i]) or nil)
  -- pcall: a value of another type is somebody else's and not a claim, and must not keep the others from being claimed.
  local claimer = redis.pcall('GET', key)
  if known and known > last and known <= ceiling then
    found[i] = {SENT, known}
  elseif over or type(claimer) == 'string' and claimer ~= owner then
    local left = redis.call('PTTL', key)
    -- A value that never ends is somebody else's: do not ask for it all the time.
    found[i] = {CLAIMED_BY_ANOTHER, left >= 0 and left or tonumber(ttl)}
  else
    redis.call('SET', key, owner, 'PX', ttl)
    found[i] = {CLAIMED, 0}
  end
end
return found
