-- Names what is asked of a lock, for acquire.lua and for what looks before it (hand_over.lua, vote.lua).
-- A key or an argument costs the server as much as half a command. So rare ones are left out if they are not needed.
-- KEYS fence, tombstone, wake, [record (if it checks),] [waiting (if it will wait, was woken, gives owners up, or has arrived),]
--      [order (if it has arrived),]
--      lock, tombstone... (of what was given up before), memory (if memory ms is not 0)
-- ARGV owner, holder, ttl ms, fence ttl ms; and the following, up to the last that is neither 0 nor empty:
--      checks finished (1: look whether the message has been carried out),
--      waiting ms (0: will not wait), ms of the caller's clock,
--      owner under which the lock may be reserved for it ('': none),
--      seed of the counter of fences ('': the server's time),
--      memory ms (0: trust the server as it is), how many may hold it beside this one (with those that took it under another limit),
--      owners that were given up (one behind the other), tombstone ms, woken (1: a wake-up has come for this),
--      arrived as ('': it has no place in an order of which only the newest runs), number in that order ('': not known), ms of that order,
--      name of its order: a holder of that order is to stop for it ('': none is), again (1: an earlier try may still be carried out)
local owner, holder, ttl, fence_ttl, checks_finished = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5] == '1'
local waiting_ms, asked_at, reserved_as = ARGV[6] or '0', ARGV[7], ARGV[8] or ''
local seed, memory_ms, limit = tonumber(ARGV[9] or ''), tonumber(ARGV[10] or 0), tonumber(ARGV[11] or 0) + 1
local given_up, tombstone_ms, wake_ms, woken = ARGV[12] or '', ARGV[13], 1000, tonumber(ARGV[14] or 0)
local order_member, arrived, order_ms = ARGV[15] or '', tonumber(ARGV[16] or ''), ARGV[17]
local stops, again = ARGV[18] or '', ARGV[19] == '1'
-- Whether it is a waiter that has just been woken, and blocks again if it gets nothing.
local is_handed_over = false

local fence, tombstone, wake = KEYS[1], KEYS[2], KEYS[3]
local FIRST, done, waiting, order = 4
if checks_finished then
  done, FIRST = KEYS[FIRST], FIRST + 1
end
if waiting_ms ~= '0' or woken > 0 or given_up ~= '' or order_member ~= '' then
  waiting, FIRST = KEYS[FIRST], FIRST + 1
end
if order_member ~= '' then
  order, FIRST = KEYS[FIRST], FIRST + 1
end
local lock = KEYS[FIRST]
local memory = memory_ms ~= 0 and KEYS[#KEYS]
