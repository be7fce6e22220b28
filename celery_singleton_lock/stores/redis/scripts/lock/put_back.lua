-- KEYS lock, over, slots, ...  ARGV value, ttl ms, slot, ... (three for each hold)
-- Puts back what a majority of a Redlock's nodes has, and this one has lost; but not if the owner has freed it meanwhile.
for i = 1, #KEYS, 3 do
  local lock, over, in_use, value, ttl, slot = KEYS[i], KEYS[i + 1], KEYS[i + 2], ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if redis.call('EXISTS', lock, over) == 0 then
    redis.call('SET', lock, value, 'PX', ttl)
    if slot ~= '0' then
      -- As in acquire.lua: a request with a lower limit has to look there as well.
      redis.call('SET', in_use, math.max(tonumber(redis.call('GET', in_use)) or 0, slot + 1), 'PX',
        math.max(redis.call('PTTL', in_use), ttl))
    end
  end
end
