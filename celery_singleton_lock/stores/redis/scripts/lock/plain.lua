-- What most acquires find, before acquire.lua looks at all that there may be: one lock, which is free, and a message that is
-- not known.
-- Follows grant.lua and answers.lua.
-- -> {GRANTED, fence, slot} | whatever follows
if #KEYS == 10 and ARGV[2] == '' and ARGV[6] == '0' then
  local done, in_use, over, request, ended, more, lock = KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[8], KEYS[9], KEYS[10]
  if redis.call('EXISTS', done, in_use, over, request, more, lock) == 0 then
    local names = ARGV[9] == '1' and redis.pcall('GET', ended)
    if type(names) ~= 'string' or not string.find(names, ARGV[19], 1, true) then
      return {GRANTED, grant(lock), 0}
    end
  end
end
