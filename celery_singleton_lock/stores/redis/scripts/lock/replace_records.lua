-- KEYS record...  ARGV record, ms, ... (a pair for each key)
-- -> {1 | 0, ...}: 1 replaced, 0 there was none
local replaced = {}
for i, done in ipairs(KEYS) do
  replaced[i] = redis.call('SET', done, ARGV[2 * i - 1], 'PX', ARGV[2 * i], 'XX') and 1 or 0
end
return replaced
