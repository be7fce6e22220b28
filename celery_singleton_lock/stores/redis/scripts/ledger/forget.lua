-- KEYS ledger, gone...  ARGV memory ms, entry... (one for each gone)
-- Forgets entries. Their last runs still count against older ones, for that long.
for i = 2, #KEYS do
  local last = redis.call('HGET', KEYS[1], ARGV[i])
  if last then
    redis.call('SET', KEYS[i], last, 'PX', ARGV[1])
    redis.call('HDEL', KEYS[1], ARGV[i])
  end
end
return 1
