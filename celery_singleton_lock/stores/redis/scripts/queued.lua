-- What an acquire looks at first that stands behind its waiter's BLPOP; acquire.lua follows this text.
-- KEYS, ARGV as for acquire.lua
-- -> {4} not any more | what acquire.lua answers
local gone = redis.call('EXISTS', KEYS[5 + ARGV[10]], KEYS[6 + ARGV[10]]) ~= 0
for i = 4, 3 + ARGV[10] do
  -- The owner has asked again meanwhile, and got it.
  gone = gone or string.sub(redis.call('GET', KEYS[i]) or '', 1, #ARGV[1]) == ARGV[1]
end
if gone then
  -- It was woken all the same: somebody else needs that.
  if redis.call('EXISTS', KEYS[2]) == 1 then
    redis.call('RPUSH', KEYS[7 + ARGV[10]], 1)
    redis.call('LTRIM', KEYS[7 + ARGV[10]], -tonumber(ARGV[10]), -1)
    redis.call('PEXPIRE', KEYS[7 + ARGV[10]], ARGV[17])
  end
  return {4}
end
