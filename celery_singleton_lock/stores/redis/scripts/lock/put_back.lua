-- KEYS lock, over, ...  ARGV value, ttl ms, ... (a pair for each pair of keys)
-- Puts back what a majority of a Redlock's nodes has, and this one has lost; but not if the owner has freed it meanwhile.
for i = 1, #KEYS, 2 do
  if redis.call('EXISTS', KEYS[i], KEYS[i + 1]) == 0 then
    redis.call('SET', KEYS[i], ARGV[i], 'PX', ARGV[i + 1])
  end
end
