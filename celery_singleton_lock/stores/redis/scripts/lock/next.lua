-- Follows line.lua.
-- KEYS waiting, asked  ARGV a waiter that leaves ('': none), wakes (1: wake the next one; otherwise only if the one that leaves was woken)
-- -> the waiter to wake, or nil
local waiting, asked, member = KEYS[1], KEYS[2], ARGV[1]
local wakes = ARGV[2] == '1'
if member ~= '' then
  wakes = wakes or redis.call('ZSCORE', waiting, member) and asked_at(asked, member) <= math.floor(now() / 1000) - LIVE_MS + COMES_MS
  leave(waiting, asked, member)
end
return wakes and next_waiter(waiting, asked) or nil
