-- Names what is asked of a lock, and what is there, for acquire.lua.
-- Follows holds.lua.
-- A key or an argument costs the server as much as half a command. So rare ones are left out if they are not needed.
-- KEYS fence, tombstone, [record (if it checks),] [waiting, asked (if it waits since some time, or has arrived),] [order (if it has arrived),]
--      lock, tombstone... (of what was given up before), memory (if memory ms is not 0)
-- ARGV owner, holder, ttl ms, fence ttl ms; and the following, up to the last that is neither 0 nor empty:
--      checks finished (1: look whether the message has been carried out),
--      waiter ('': gets no place), since when it waits (ms; 0: it leaves the lock to nobody),
--      owner under which the lock may be reserved for it ('': none),
--      seed of the counter of fences ('': the server's time),
--      memory ms (0: trust the server as it is), how many may hold it beside this one (with those that took it under another limit),
--      tombstone ms,
--      arrived as ('': it has no place in an order of which only the newest runs), number in that order ('': not known), ms of that order,
--      name of its order: a holder of that order is to stop for it ('': none is), again (1: an earlier try may still be carried out)
local owner, holder, ttl, fence_ttl, checks_finished = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1'
local member, since, reserved_as = ARGV[6] or '', ARGV[7] or '0', ARGV[8] or ''
local seed, memory_ms, limit = tonumber(ARGV[9] or ''), tonumber(ARGV[10] or 0), tonumber(ARGV[11] or 0) + 1
local tombstone_ms, order_member, arrived, order_ms = ARGV[12], ARGV[13] or '', tonumber(ARGV[14] or ''), ARGV[15]
local stops, again = ARGV[16] or '', ARGV[17] == '1'

local fence, tombstone = KEYS[1], KEYS[2]
local FIRST, done, waiting, asked, order = 3
if checks_finished then
  done, FIRST = KEYS[FIRST], FIRST + 1
end
if since ~= '0' or order_member ~= '' then
  waiting, asked, FIRST = KEYS[FIRST], KEYS[FIRST + 1], FIRST + 2
end
if order_member ~= '' then
  order, FIRST = KEYS[FIRST], FIRST + 1
end
local lock = KEYS[FIRST]
local memory = memory_ms ~= 0 and KEYS[#KEYS]
local values, lasts, is_set = holds_of(lock)
