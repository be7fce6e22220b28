-- What most acquires find, before acquire.lua looks at all that there may be: one lock, which is free, for which nobody waits or was just
-- woken, and a message that is not known.
-- Follows request.lua, grant.lua and answers.lua. PLAIN: arguments of an acquire that says nothing of what is rare, see request.lua.
-- -> {GRANTED, fence, slot} | whatever follows
local PLAIN = 7
if #ARGV <= PLAIN and redis.call('EXISTS', unpack(KEYS, OTHERS)) == 0 then
  local names = once and redis.pcall('GET', ended)
  if type(names) ~= 'string' or not string.find(names, ended_name, 1, true) then
    return {GRANTED, grant(KEYS[FIRST], owner, holder, ttl, fence, fence_ttl, nil, request), 0}
  end
end
