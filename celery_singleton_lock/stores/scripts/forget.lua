-- KEYS ledger  ARGV since, ceiling, entry...: those are kept whose last run is between these two
for i = 3, #ARGV do
  local last = tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or 0)
  if last < tonumber(ARGV[1]) or last > tonumber(ARGV[2]) then
    redis.call('HDEL', KEYS[1], ARGV[i])
  end
end
return 1
