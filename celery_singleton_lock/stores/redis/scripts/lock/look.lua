-- A process with copies in line takes its place again, and looks at the lock.
-- Follows holds.lua and line.lua.
-- KEYS lock, waiting, asked  ARGV waiter, since ms, copies, how many may hold the lock
-- -> how many of its copies may begin; negative: the lock is left to those who have waited for longer
local lock, waiting, asked = unpack(KEYS)
local member, since, copies, limit = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
enrol(waiting, asked, member, since, copies)
local places = limit - #holds_of(lock)
local free = places - count_before(waiting, asked, member, since)
return free > 0 and free or places > 0 and -1 or 0
