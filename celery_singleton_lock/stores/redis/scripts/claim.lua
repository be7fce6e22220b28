-- KEYS ledger, over, claim..., gone...  ARGV owner, ttl ms, ceiling, (entry, last)... (a claim, a gone and a pair for each)
-- -> {{1, 0} claimed | {2, last} sent meanwhile | {0, pttl} claimed by somebody else, ...}
-- A claim is for the tick that follows `last`. Idempotent by owner.
local owner, ttl, ceiling = ARGV[1], ARGV[2], tonumber(ARGV[3])
local found, count = {}, (#KEYS - 2) / 2
-- The owner was given up, and nobody waits for this any more.
local over = redis.call('EXISTS', KEYS[2]) == 1
for i = 1, count do
  local entry, last, key = ARGV[2 + 2 * i], tonumber(ARGV[3 + 2 * i]), KEYS[2 + i]
  local known = tonumber(redis.call('HGET', KEYS[1], entry) or redis.call('GET', KEYS[2 + count + i]) or nil)
  local claimer = redis.call('GET', key)
  if known and known > last and known <= ceiling then
    found[i] = {2, known}
  elseif over or claimer and claimer ~= owner then
    found[i] = {0, math.max(redis.call('PTTL', key), 0)}
  else
    redis.call('SET', key, owner, 'PX', ttl)
    found[i] = {1, 0}
  end
end
return found
