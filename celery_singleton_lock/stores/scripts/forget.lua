-- KEYS ledger, gone...  ARGV memory ms, ceiling, entry... (one for each gone)
-- Their last runs are known to who claims, and to nobody else, for so long.
for i = 2, #KEYS do
  local entry = ARGV[i + 1]
  local last = tonumber(redis.call('HGET', KEYS[1], entry) or nil)
  if last and last <= tonumber(ARGV[2]) then
    redis.call('SET', KEYS[i], string.format('%.0f', last), 'PX', ARGV[1])
  end
  redis.call('HDEL', KEYS[1], entry)
end
return 1
