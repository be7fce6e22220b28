-- Follows now.lua and ended.lua.
-- KEYS record, messages that are over, more of them, aside (see now.lua), ... (four for each)
-- ARGV record, ms, name among those that are over, ms for which it is one (0: the record alone says that), ...
-- -> {1 | 0, ...}: 1 replaced, 0 there was none
local settled = {}
for i = 1, #KEYS / 4 do
  local done, ended, more, aside = KEYS[4 * i - 3], KEYS[4 * i - 2], KEYS[4 * i - 1], KEYS[4 * i]
  local record, ms, name, ended_ms = ARGV[4 * i - 3], ARGV[4 * i - 2], ARGV[4 * i - 1], ARGV[4 * i]
  settled[i] = redis.call('SET', done, record, 'PX', ms, 'XX') and 1 or 0
  if settled[i] == 1 and ended_ms ~= '0' and not note_end(ended, more, name, tonumber(ended_ms), aside) then
    redis.call('PEXPIRE', done, ended_ms)
  end
end
return settled
