-- What most hand-overs find, before hand_over.lua and acquire.lua look at everything: one lock that is free, no other wake-up, and a waiter that
-- still waits, whose message is not known. As plain.lua does for an acquire.
-- Follows grant.lua and answers.lua. request.lua, which names the KEYS and ARGV, comes after it.
-- WOKEN: the number of arguments of a hand-over without an order. SLOTS: which of them is the number of locks.
-- -> {GRANTED, fence, slot} | whatever follows
local WOKEN, SLOTS = 18, 10
if #ARGV == WOKEN and ARGV[SLOTS] == '1' then
  local name = ARGV[5]
  -- OTHERS in request.lua. The last key is the lock; the one before it, the places of those that wait, is there.
  local others = name == '' and 2 or 3
  if redis.call('EXISTS', KEYS[#KEYS], unpack(KEYS, others, #KEYS - 2)) == 0 then
    local names = others == 3 and redis.pcall('GET', KEYS[2])
    if type(names) ~= 'string' or not string.find(names, name, 1, true) then
      redis.call('ZADD', KEYS[#KEYS - 1], 'XX', 0, ARGV[1])
      return {GRANTED, grant(KEYS[#KEYS], ARGV[1], ARGV[2], ARGV[3], KEYS[1], ARGV[4], nil, KEYS[others + 2]), 0}
    end
  end
end
