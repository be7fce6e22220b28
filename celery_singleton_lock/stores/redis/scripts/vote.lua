-- What one node of a Redlock looks at before acquire.lua, which follows this text.
-- KEYS ..., over, over of this attempt, memory (the last three)
-- ARGV as for acquire.lua, then memory ms (0: trust the node as it is)
-- -> {3, ms} no vote, for so long | what acquire.lua answers
if redis.call('EXISTS', KEYS[#KEYS - 2], KEYS[#KEYS - 1]) ~= 0 then
  -- The owner has released, or given up this attempt: what comes behind that must not take the lock after all.
  return {3, 0}
end
if ARGV[#ARGV] ~= '0' then
  -- A node that has forgotten everything (a restart, a flush) does not know who holds what: it has no vote for one ttl.
  local memory, ttl, lifetime = KEYS[#KEYS], tonumber(ARGV[4]), tonumber(ARGV[#ARGV])
  local left = redis.call('PTTL', memory)
  if left < 0 then
    redis.call('SET', memory, 1, 'PX', lifetime)
    left = lifetime
  end
  if lifetime - left < ttl and redis.call('EXISTS', KEYS[4 + tonumber(ARGV[11])]) == 0 then
    return {3, ttl - (lifetime - left)}
  end
end
