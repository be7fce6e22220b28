-- What most acquires find, before acquire.lua looks at everything: one lock that is free, that nobody waits for or was just woken for, and
-- a message that is not known.
-- Follows grant.lua and answers.lua. request.lua, which names the KEYS and ARGV, comes after it: naming them takes a good part of the time.
-- PLAIN: the number of arguments of an acquire without anything rare.
-- -> {GRANTED, fence, slot} | whatever follows
local PLAIN = 7
if #ARGV <= PLAIN then
  local name = ARGV[5] or ''
  -- OTHERS in request.lua. The last key is the lock.
  local others = name == '' and 2 or 3
  if redis.call('EXISTS', unpack(KEYS, others)) == 0 then
    local names = others == 3 and redis.pcall('GET', KEYS[2])
    if type(names) ~= 'string' or not string.find(names, name, 1, true) then
      return {GRANTED, grant(KEYS[#KEYS], ARGV[1], ARGV[2], ARGV[3], KEYS[1], ARGV[4], nil, KEYS[others + 2]), 0}
    end
  end
end
