-- What one node of a Redlock looks at before acquire.lua, which follows this text.
-- KEYS ..., over, memory (the last two)  ARGV as for acquire.lua, then memory ms (0: trust the node as it is)
-- -> {3, ms} no vote for so long | what acquire.lua answers
if redis.call('EXISTS', KEYS[#KEYS - 1]) == 1 then
  -- This owner has released, or given up: a request that comes behind that must not take the lock after all.
  return {3, 0}
end
if ARGV[10] ~= '0' then
  -- A node that has forgotten everything (a restart, a flush) does not know who holds what: it has no vote for one ttl.
  local lifetime, left = tonumber(ARGV[10]), redis.call('PTTL', KEYS[#KEYS])
  if left < 0 then
    redis.call('SET', KEYS[#KEYS], 1, 'PX', lifetime)
    left = lifetime
  end
  local age = lifetime - left
  if age < tonumber(ARGV[4]) and redis.call('EXISTS', KEYS[4]) == 0 then
    return {3, tonumber(ARGV[4]) - age}
  end
end
