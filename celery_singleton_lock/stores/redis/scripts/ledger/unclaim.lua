-- KEYS tombstone, claim...  ARGV owner, tombstone ms
-- -> 1
-- Ends the owner's claims; its late requests claim nothing any more.
for i = 2, #KEYS do
  if redis.pcall('GET', KEYS[i]) == ARGV[1] then
    redis.call('DEL', KEYS[i])
  end
end
redis.call('SET', KEYS[1], 1, 'PX', ARGV[2])
return 1
