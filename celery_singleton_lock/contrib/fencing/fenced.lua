-- KEYS data, fence
-- ARGV fence, ms by which the fence outlives the data, command, its arguments after the key
-- -> {1, the command's answer} | {0, the higher fence that was seen}
local data, seen = KEYS[1], redis.call('GET', KEYS[2])
local fence, grace = ARGV[1], tonumber(ARGV[2])
if seen and tonumber(seen) > tonumber(fence) then
  return {0, seen}
end
local answer = redis.call(ARGV[3], data, unpack(ARGV, 4))
-- As long as there is data, and then for as long as a stale holder may still be around.
local pttl = redis.call('PTTL', data)
if pttl == -1 then
  redis.call('SET', KEYS[2], fence)
else
  redis.call('SET', KEYS[2], fence, 'PX', math.max(pttl, 0) + grace)
end
return {1, answer}
