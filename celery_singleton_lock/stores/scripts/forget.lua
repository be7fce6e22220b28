-- KEYS ledger  ARGV entry...
for _, entry in ipairs(ARGV) do
  redis.call('HDEL', KEYS[1], entry)
end
return 1
