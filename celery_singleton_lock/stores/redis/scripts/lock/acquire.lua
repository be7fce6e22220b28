-- Takes a lock, or a slot of a semaphore.
-- Follows request.lua, which names the KEYS and ARGV, places.lua, grant.lua, newest.lua and answers.lua.
-- -> {GRANTED, fence, slot} | {HELD, value, pttl, slot} | {RECORD, record, pttl} this message has been carried out
--  | {GIVEN_UP} the owner takes nothing any more | {MORE_SLOTS, slots} more slots are in use: name them all
--  | {NEWEST, value, pttl, slot, number} held, and this message is the newest of an order of which only the newest runs; with its number there
--  | {SUPERSEDED, value, pttl, slot, newest} this message is not the newest
-- Idempotent by owner: a repeated acquire whose first reply was lost gets the same hold. The first one may come last, when the owner has freed it:
-- so a grant to a repeated one leaves the owner's tombstone. An owner that has one keeps what it has, and takes nothing.
-- FORGOTTEN_MS: how long a waiter that was killed stays in `waiting`. Main processes are there, too, except on a Redlock, by when their first copy
-- met its first conflict.
local OWNER_LENGTH, FENCE, FORGOTTEN_MS = 32, 10, 86400000
if redis.call('EXISTS', over, in_use) ~= 0 then
  if redis.call('EXISTS', over) == 1 and not is_held_by(owner) then
    return {GIVEN_UP}
  end
  local known = tonumber(redis.call('GET', in_use)) or 0
  if known > slots then
    return {MORE_SLOTS, known}
  end
end

-- Late requests of what was given up take nothing, and what these owners hold is free.
local freed = 0
local function take_from(whose)
  for slot = 0, slots - 1 do
    if holds(slot, whose) then
      redis.call('DEL', KEYS[FIRST + slot])
      freed = freed + 1
    end
  end
end

for i = FIRST + slots, #KEYS - (memory and 1 or 0) do
  redis.call('SET', KEYS[i], 1, 'PX', over_ms)
end
for at = 1, #given_up, #owner do
  take_from(string.sub(given_up, at, at + #owner - 1))
end

if once then
  local record = redis.pcall('GET', done)
  if type(record) == 'string' then
    take_from(owner)  -- By a try whose answer was lost.
    -- The holder wakes the next one.
    local is_taken = woken == 1 and redis.call('EXISTS', unpack(KEYS, FIRST, FIRST + limit - 1)) >= limit
    wake_others(freed + (is_taken and 0 or woken))
    return {RECORD, record, redis.call('PTTL', done)}
  end
end

local place, newer, before
if order then
  place, newer, before = arrive()
end

local held, free, kept, copy, first, first_pttl, first_slot = 0
for slot = 0, slots - 1 do
  local lock = KEYS[FIRST + slot]
  local value = redis.call('GET', lock)
  if not value then
    if slot < limit then
      free = free or slot
    end
  else
    local token = string.sub(value, 1, #owner)
    held = held + 1
    if token == owner then
      -- If this one comes late, its hold does not end sooner.
      ttl = math.max(redis.call('PTTL', lock), ttl)
      -- Its own fence: the highest one is another's if several hold the lock, or is not known any more.
      local readable, fields = pcall(cjson.decode, string.sub(value, #owner + 1))
      local number = readable and type(fields) == 'table' and tonumber(fields[FENCE])
      if number and fields[NEWER] then
        redis.call('PEXPIRE', lock, ttl) -- It is to stop, which is not to be forgotten.
      elseif number then
        redis.call('SET', lock, owner .. string.gsub(holder, '\n', ',' .. string.format('%.0f', number), 1), 'PX', ttl)
      else
        number = grant(lock, owner, holder, ttl, fence, fence_ttl, seed)
      end
      if slot > 0 then
        redis.call('SET', in_use, math.max(tonumber(redis.call('GET', in_use)) or 0, slot + 1), 'PX',
          math.max(redis.call('PTTL', in_use), ttl))
      end
      if again then
        redis.call('SET', over, 1, 'PX', over_ms)
      end
      wake_others(freed)
      return {GRANTED, number, slot}
    elseif reserved_as ~= '' and token == reserved_as then
      kept = slot
    else
      local pttl = redis.call('PTTL', lock)
      if sending ~= '' and string.sub(value, OWNER_LENGTH + 1, OWNER_LENGTH + #sending) == sending then
        copy = {HELD, value, pttl, slot}
      elseif not first or first_pttl < 0 or pttl >= 0 and pttl < first_pttl then
        first, first_pttl, first_slot = value, pttl, slot
      end
    end
  end
end

-- Never two copies of one message at once, nor one owner in two slots, even if there is room. Every hold counts, also in
-- slots beyond the limit, if there was a higher one. What is kept there moves to within the limit.
if kept and newer and stops ~= '' then
  redis.call('DEL', KEYS[FIRST + kept]) -- Nor is what was kept for it to keep the newest waiting.
  freed, held, kept = freed + 1, held - 1, nil
end
local slot
if copy then
  slot = nil
elseif newer and not kept then
  slot = nil -- It is never to run.
elseif kept and kept < limit then
  slot = kept
elseif free and (kept or held < limit) then
  slot = free
  if kept then
    redis.call('DEL', KEYS[FIRST + kept])
  end
elseif stops ~= '' and first then
  local is_kept
  first, is_kept = stop(KEYS[FIRST + first_slot], first)
  -- As for a slot that is free: others may run beside it, under a higher limit.
  slot = is_kept and held <= limit and first_slot or nil
end
if not slot then
  if newer and not copy then
    if waiting_ms ~= '0' then
      redis.call('ZADD', waiting, 'XX', 0, owner)
    end
    -- It does not take the lock that it was woken for, or has found free.
    wake_others(math.max(freed, held < limit and 1 or 0))
    return {SUPERSEDED, first or '', first_pttl or 0, first_slot or 0, newer}
  end
  if waiting_ms ~= '0' then
    if redis.call('ZADD', waiting, asked_at, owner) == 1 then
      redis.call('ZREMRANGEBYSCORE', waiting, '-inf', asked_at - (seed and 10 * waiting_ms or FORGOTTEN_MS))
    end
    redis.call('PEXPIRE', waiting, waiting_ms)
  end
  if copy or not order then
    -- A copy that was woken takes no second slot, so the free one is for another. (A waiter would only wake itself, again and again.)
    local is_unused = copy and held < limit and not is_handed_over
    wake_others(freed + (is_unused and woken or 0))
    return copy or {HELD, first or '', first_pttl or 0, first_slot or 0}
  end
  -- Wake the message that waited before this one, to end: it is the first in line, if all of them are of the order.
  local waits = before and string.sub(first or '', #owner + 1, #owner + #before) ~= before
  wake_others(math.max(freed, waits and 1 or 0))
  return {NEWEST, first or '', first_pttl or 0, first_slot or 0, place}
end

if waiting_ms ~= '0' then
  -- It does not wait any more. Not removed: the key must be there until nobody has looked for a while, or somebody would not be woken.
  redis.call('ZADD', waiting, 'XX', 0, owner)
end
local number = grant(KEYS[FIRST + slot], owner, holder, ttl, fence, fence_ttl, seed)
if slots == 1 and not seed and string.sub(wake, -11) ~= ':queue:wake' then
  -- The next to block would be woken by it for nothing, and lose its place. Not what was passed on: it may be for a follower of the run before,
  -- which does not need the lock. (An attempt on a Redlock may fail. Beside the lock of a message wait followers of the message before it, too.)
  redis.pcall('LREM', wake, 0, 1)
end
if slot > 0 then
  -- A request with a lower limit has to look there as well, for as long as anything is held there.
  local left = redis.call('PTTL', in_use)
  local known = left > 0 and tonumber(redis.call('GET', in_use)) or 0
  redis.call('SET', in_use, math.max(known, slot + 1), 'PX', math.max(left, ttl))
end
if again then
  redis.call('SET', over, 1, 'PX', over_ms)
end
wake_others(freed - 1)
return {GRANTED, number, slot}
