-- What is remembered of a message, for another one.
-- Follows answers.lua.
-- KEYS record
-- -> {RECORD, record, ms for which the message is remembered} | {GRANTED} nothing. A promise (see refuse.lua) is nothing yet.
local record = redis.pcall('GET', KEYS[1])
if type(record) == 'string' and string.sub(record, 1, 1) ~= '?' then
  return {RECORD, record, redis.call('PTTL', KEYS[1])}
end
return {GRANTED}
