-- Takes a lock that nobody holds; or, under a limit, that fewer hold.
-- Follows request.lua, which names the KEYS and ARGV, holds.lua, line.lua, grant.lua, newest.lua and answers.lua.
-- -> {GRANTED, fence} | {HELD, value, pttl} | {HELD, '', pttl} it is left to one that has waited for longer
--  | {RECORD, record, pttl} this message has been carried out
--  | {GIVEN_UP} the owner takes nothing any more | {NO_VOTE, ms} a node of a Redlock has no vote for so long
--  | {NEWEST, value, pttl, number, waiter to wake or ''} held, and this message is the newest of an order of which only the newest runs; with its
--    number there
--  | {SUPERSEDED, value, pttl, newest, waiter to wake or ''} this message is not the newest
-- Idempotent by owner: a repeated acquire whose first reply was lost gets the same hold. The first one may come last, when the owner has freed it:
-- so a grant to a repeated one leaves the owner's tombstone. An owner that has one keeps what it has, and takes nothing.
local is_given_up = redis.call('EXISTS', tombstone) == 1
if memory and not is_given_up then
  -- A node that has forgotten everything (a restart, a flush) does not know who holds what: it has no vote for one ttl.
  local left = redis.call('PTTL', memory)
  if left < 0 then
    redis.call('SET', memory, 1, 'PX', memory_ms)
    left = memory_ms
  end
  local remembers = memory_ms - left
  if remembers < tonumber(ttl) and #values == 0 then
    return {NO_VOTE, ttl - remembers}
  end
end
if is_given_up and not hold_of(lock, owner) then
  return {GIVEN_UP}
end

-- Late requests of what was given up take nothing, and what these owners hold is free.
local function take_from(whose)
  for i = #values, 1, -1 do
    if begins_with(values[i], whose) then
      put(lock, table.remove(values, i), nil, 0, is_set)
      table.remove(lasts, i)
    end
  end
end

for i = FIRST + 1, #KEYS - (memory and 1 or 0) do
  redis.call('SET', KEYS[i], 1, 'PX', tombstone_ms)
  take_from(string.sub(KEYS[i], -#owner)) -- A tombstone's key ends with its owner.
end

if checks_finished then
  local record = redis.pcall('GET', done)
  if type(record) == 'string' then
    take_from(owner)  -- By a try whose answer was lost.
    return {RECORD, record, redis.call('PTTL', done)}
  end
end

local place, newer, before
if order then
  place, newer, before = arrive()
end

-- How the holder of a copy begins: up to its sending, if it has one. Of a lock with one holder, only an order needs to know whether that is a copy.
local beginning
if limit > 1 or #values > 1 or order then
  local _, last = string.find(string.gsub(holder, '\\.', '..'), '^%["[^"]+",')
  beginning = last and string.sub(holder, 1, last)
end

local function grant(old, number, value)
  put(lock, old, value or owner .. string.gsub(holder, '\n', ',' .. number, 1), ttl, is_set)
  if again then
    redis.call('SET', tombstone, 1, 'PX', tombstone_ms)
  end
  return {GRANTED, tonumber(number)}
end

local held, kept, copy, first, first_pttl = #values
for i, value in ipairs(values) do
  local token, pttl = string.sub(value, 1, #owner), lasts[i]
  if token == owner then
    -- If this one comes late, its hold does not end sooner.
    ttl = math.max(pttl, ttl)
    -- Its own fence: the highest one is another's if several hold the lock, or is not known any more.
    local fields = holder_of(value)
    local number = tonumber(fields[FENCE])
    number = number and string.format('%.0f', number) or next_fence(fence, fence_ttl, seed)
    return grant(value, number, fields[NEWER] and value) -- That it is to stop is not to be forgotten.
  elseif reserved_as ~= '' and token == reserved_as then
    kept = value
  elseif beginning and begins_with(string.sub(value, OWNER_LENGTH + 1), beginning) then
    copy = {HELD, value, pttl}
  elseif not first or first_pttl < 0 or pttl >= 0 and pttl < first_pttl then
    first, first_pttl = value, pttl
  end
end

-- Never two copies of one message at once, nor one owner twice, even if there is room. Every hold counts, whatever limit it was taken under.
if kept and newer and stops ~= '' then
  put(lock, kept, nil, 0, is_set) -- Nor is what was kept for it to keep the newest waiting.
  held, kept = held - 1, nil
end
local in_use, replaced, takes = held, kept, false
if kept then
  -- Its next attempt begins beside what is only kept for others: they would wait for each other. (What an operator has taken from a task is kept
  -- for nobody while that task ends.)
  in_use = 0
  for _, value in ipairs(values) do
    local fields = holder_of(value)
    if value ~= kept and not (fields[TTL] == 0 and (tonumber(fields[REPLACED]) or 0) >= 0) then
      in_use = in_use + 1
    end
  end
elseif first and not is_set and (first_pttl < 0 or not string.find(first, HOLD)) then
  in_use = limit -- Somebody else's value, or one that does not end, cannot become an element of a set.
end
if copy or newer and not kept then
  takes = false -- A message that is not the newest is never to run.
elseif in_use < limit then
  -- One that was woken, and has waited for longer, may be about to come.
  takes = kept or since == '0' or in_use + count_before(waiting, asked, member, since) < limit
  if not (takes or first) then
    first, first_pttl = '', COMES_MS
  end
elseif stops ~= '' then
  for i, value in ipairs(values) do
    local stopped, is_kept = stop(value, lasts[i])
    first = value == first and stopped or first
    -- As for a free place: others may run beside it, under a higher limit.
    if is_kept and held <= limit then
      takes, replaced = true, value
    end
  end
end
if not takes then
  if newer and not copy then
    if member ~= '' then
      leave(waiting, asked, member)
    end
    -- It does not take the lock that it was woken for, or has found free.
    return {SUPERSEDED, first or '', first_pttl or 0, newer, held < limit and next_waiter(waiting, asked) or ''}
  end
  if member ~= '' then
    -- One whose message runs holds nobody back from the other places.
    enrol(waiting, asked, member, copy and 'inf' or since, 1)
  end
  if copy or not order then
    return copy or {HELD, first or '', first_pttl or 0}
  end
  -- Wake the message that waited before this one, to end: it is the first in line, if all of them are of the order.
  local waits = before and string.sub(first or '', #owner + 1, #owner + #before) ~= before
  return {NEWEST, first or '', first_pttl or 0, place, waits and next_waiter(waiting, asked) or ''}
end

if member ~= '' then
  leave(waiting, asked, member)
end
if replaced then
  put(lock, replaced, nil, 0, is_set)
elseif first and not is_set then
  redis.call('DEL', lock)
  put(lock, nil, first, first_pttl, true)
end
is_set = limit > 1 or is_set and first ~= nil
return grant(nil, next_fence(fence, fence_ttl, seed))
