-- What is asked of a lock, by name, for acquire.lua and for what looks before it (hand_over.lua, vote.lua).
-- KEYS fence, waiting, record, slots, over, over of this request, wake, messages that are over, more of them,
--      lock... (one lock, or the slots of a semaphore), over... (of what was given up before), memory (if memory ms is not 0)
-- ARGV owner, owner under which the lock may be reserved for it ('': none), holder, ttl ms, fence ttl ms,
--      waiting ms (0: will not wait), ms of the caller's clock,
--      sending (how the holder of a copy begins, behind the 32 characters of the owner; '' where there is none),
--      once (1: look whether this message has been carried out), locks that are named, slot to take ('': any),
--      seed of the counter of fences ('': the server's time), limit (the slots beyond it are looked at, and not taken),
--      owners that were given up (one behind the other), over ms, wake ms, woken (1: a wake-up has come for this),
--      memory ms (0: trust the server as it is), name of this message among those that are over
local fence, waiting, done, in_use, over, request, wake = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local ended, more = KEYS[8], KEYS[9]
local FIRST = 10
local owner, reserved_as, holder, ttl, fence_ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local waiting_ms, asked_at, sending, once, slots = ARGV[6], ARGV[7], ARGV[8], ARGV[9], tonumber(ARGV[10])
local wanted, seed, limit, given_up, over_ms = tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13]), ARGV[14], ARGV[15]
local wake_ms, woken, memory_ms, ended_name = ARGV[16], tonumber(ARGV[17]), tonumber(ARGV[18]), ARGV[19]
local memory = memory_ms ~= 0 and KEYS[#KEYS]

local function holds(slot, whose)
  return string.sub(redis.call('GET', KEYS[FIRST + slot]) or '', 1, #whose) == whose
end

local function wake_others(places)
  if places > 0 and redis.call('EXISTS', waiting) == 1 then
    for _ = 1, places do
      redis.call('RPUSH', wake, 1)
    end
    redis.call('LTRIM', wake, -slots, -1)
    redis.call('PEXPIRE', wake, wake_ms)
  end
end
