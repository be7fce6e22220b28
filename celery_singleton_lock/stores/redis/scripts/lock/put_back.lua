-- KEYS lock, tombstone, ...  ARGV value, ttl ms, ... (two for each hold)
-- Puts back what a majority of a Redlock's nodes has, and this one has lost; but not if the owner has freed it meanwhile.
for i = 1, #KEYS, 2 do
  local lock, tombstone, value, ttl = KEYS[i], KEYS[i + 1], ARGV[i], ARGV[i + 1]
  if redis.call('EXISTS', lock, tombstone) == 0 then
    redis.call('SET', lock, value, 'PX', ttl)
  end
end
