-- What is remembered of a message, for another one.
-- Follows now.lua, answers.lua and ended.lua.
-- KEYS record, messages that are over, more of them, aside (see now.lua)
-- ARGV name of the message among those that are over
-- -> {RECORD, record, ms for which the message is remembered} | {GRANTED} nothing. A promise (see refuse.lua) is nothing yet.
local done, ended, more, aside = unpack(KEYS)
local record = redis.pcall('GET', done)
local left = known_for(ended, more, ARGV[1], aside)
if type(record) == 'string' and string.sub(record, 1, 1) ~= '?' then
  return {RECORD, record, left or redis.call('PTTL', done)}
end
if left then
  return {RECORD, FORGOTTEN, left}
end
return {GRANTED}
