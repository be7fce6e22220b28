-- Follows now.lua and ended.lua.
-- KEYS record, messages that are over, aside (see now.lua), ... (three for each)
-- ARGV record, ms, name among those that are over, ms for which it is one (0: the record alone says that), ...
-- -> {1 | 0, ...}: 1 replaced, 0 there was none
local settled = {}
for i = 1, #KEYS / 3 do
  local done, ended, aside = KEYS[3 * i - 2], KEYS[3 * i - 1], KEYS[3 * i]
  local record, ms, name, ended_ms = ARGV[4 * i - 3], ARGV[4 * i - 2], ARGV[4 * i - 1], ARGV[4 * i]
  settled[i] = redis.call('SET', done, record, 'PX', ms, 'XX') and 1 or 0
  if settled[i] == 1 and ended_ms ~= '0' and not note_end(ended, name, tonumber(ended_ms), aside) then
    redis.call('PEXPIRE', done, ended_ms)
  end
end
return settled
