-- KEYS ledger, claim..., gone...  ARGV owner, ttl ms, ceiling, (entry, last)... (a claim, a gone and a pair for each)
-- -> {{1, 0} claimed | {2, last} sent meanwhile | {0, pttl} claimed by somebody else, ...}
-- A claim is for the tick that follows `last`. Idempotent by owner.
local owner, ttl, ceiling = ARGV[1], ARGV[2], tonumber(ARGV[3])
local found, count = {}, (#KEYS - 1) / 2
for i = 2, count + 1 do
  local entry, last = ARGV[2 * i], tonumber(ARGV[2 * i + 1])
  local known = tonumber(redis.call('HGET', KEYS[1], entry) or redis.call('GET', KEYS[count + i]) or nil)
  local claimer = redis.call('GET', KEYS[i])
  if known and known > last and known <= ceiling then
    found[i - 1] = {2, known}
  elseif claimer and claimer ~= owner then
    found[i - 1] = {0, redis.call('PTTL', KEYS[i])}
  else
    redis.call('SET', KEYS[i], owner, 'PX', ttl)
    found[i - 1] = {1, 0}
  end
end
return found
