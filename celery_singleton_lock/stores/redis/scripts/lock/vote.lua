-- What one node of a Redlock looks at before acquire.lua, which follows this text.
-- Follows request.lua.
-- -> {NO_VOTE, ms} no vote for so long | what acquire.lua answers
if memory and redis.call('EXISTS', tombstone) == 0 then
  -- A node that has forgotten everything (a restart, a flush) does not know who holds what: it has no vote for one ttl.
  local left = redis.call('PTTL', memory)
  if left < 0 then
    redis.call('SET', memory, 1, 'PX', memory_ms)
    left = memory_ms
  end
  local since = memory_ms - left
  if since < tonumber(ttl) and redis.call('EXISTS', KEYS[FIRST]) == 0 then
    return {NO_VOTE, ttl - since}
  end
end
