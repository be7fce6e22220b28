-- KEYS fence, waiting, done, lock... (one lock, or the slots of a semaphore), slots, over, over of this request, wake,
--      over... (of what was given up before)
-- ARGV owner, heir, holder, ttl ms, fence ttl ms, waiting ms (0: will not wait), ms of the caller's clock, sending (how the
--      holder of a copy begins, behind the 32 characters of the owner; '' where there is none), once (1: look whether
--      this message has been carried out), slots, slot ('': any), seed of the counter of fences ('': the server's time),
--      limit (the slots beyond it are looked at, and not taken), owners that were given up (one behind the other), over ms,
--      number of the last keys over, wake ms, woken (1: a wake-up has come for this)
-- -> {1, fence, slot} | {0, value, pttl, slot} held | {2, record, pttl} this message has been carried out
--  | {4} the owner or the request was given up meanwhile | {5, slots} so many are in use: name them all
-- Follows now.lua. Idempotent by owner: a repeated acquire whose first reply was lost gets the same hold.
local fence, waiting, done = KEYS[1], KEYS[2], KEYS[3]
local owner, heir, holder, ttl, fence_ttl, waiting_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local looked_at, sending, once, slots, wanted = ARGV[7], ARGV[8], ARGV[9], tonumber(ARGV[10]), tonumber(ARGV[11])
local limit, given_up, over_ms, woken = tonumber(ARGV[13]), ARGV[14], ARGV[15], tonumber(ARGV[18])
local in_use, over, request, wake = KEYS[4 + slots], KEYS[5 + slots], KEYS[6 + slots], KEYS[7 + slots]

if redis.call('EXISTS', over, request, in_use) ~= 0 then
  if redis.call('EXISTS', over, request) ~= 0 then
    return {4}
  end
  local known = tonumber(redis.call('GET', in_use)) or 0
  if known > slots then
    return {5, known}
  end
end

-- What arrives later of that takes nothing, and what these owners hold is free.
local freed = 0
for i = 8 + slots, 7 + slots + ARGV[16] do
  redis.call('SET', KEYS[i], 1, 'PX', over_ms)
end
for at = 1, #given_up, #owner do
  for slot = 0, slots - 1 do
    if string.sub(redis.call('GET', KEYS[4 + slot]) or '', 1, #owner) == string.sub(given_up, at, at + #owner - 1) then
      redis.call('DEL', KEYS[4 + slot])
      freed = freed + 1
    end
  end
end

local function pass_on(places)
  if places > 0 and redis.call('EXISTS', waiting) == 1 then
    for _ = 1, places do
      redis.call('RPUSH', wake, 1)
    end
    redis.call('LTRIM', wake, -slots, -1)
    redis.call('PEXPIRE', wake, ARGV[17])
  end
end

if once == '1' then
  local record = redis.pcall('GET', done)
  if type(record) == 'string' then
    pass_on(freed + woken)
    return {2, record, redis.call('PTTL', done)}
  end
end

local held, free, kept, copy, first, first_pttl, first_slot = 0
for slot = 0, slots - 1 do
  local lock = KEYS[4 + slot]
  local value = redis.call('GET', lock)
  if not value then
    if slot < limit and (not wanted or slot == wanted) then
      free = free or slot
    end
  else
    local holds = string.sub(value, 1, #owner)
    local asked_for = not wanted or slot == wanted
    held = held + 1
    if holds == owner and asked_for then
      redis.call('SET', lock, owner .. holder, 'PX', ttl)
      if slot > 0 then
        redis.call('SET', in_use, math.max(tonumber(redis.call('GET', in_use)) or 0, slot + 1), 'PX',
          math.max(redis.call('PTTL', in_use), ttl))
      end
      pass_on(freed)
      return {1, tonumber(redis.call('GET', fence) or 0), slot}
    elseif heir ~= '' and holds == heir and (asked_for or slot >= limit) then
      kept = slot
    else
      local pttl = redis.call('PTTL', lock)
      if holds == owner or sending ~= '' and string.sub(value, 33, 32 + #sending) == sending then
        copy = {0, value, pttl, slot}
      elseif not first or first_pttl < 0 or pttl >= 0 and pttl < first_pttl then
        first, first_pttl, first_slot = value, pttl, slot
      end
    end
  end
end

-- Neither two copies of one message beside each other, nor one owner in two slots, also where there is room. Whatever is
-- held counts, also in slots beyond the limit, where there was a higher one. What is kept there moves to within it.
local slot
if copy then
  slot = nil
elseif kept and kept < limit then
  slot = kept
elseif free and (kept or held < limit) then
  slot = free
  if kept then
    redis.call('DEL', KEYS[4 + kept])
  end
end
if not slot then
  if waiting_ms ~= '0' then
    redis.call('ZADD', waiting, looked_at, owner)
    redis.call('ZREMRANGEBYSCORE', waiting, '-inf', looked_at - 10 * waiting_ms)
    redis.call('PEXPIRE', waiting, waiting_ms)
  end
  pass_on(freed)
  return copy or {0, first or '', first_pttl or 0, first_slot or 0}
end

if waiting_ms ~= '0' then
  -- It waits no more. Not removed: the key is there until nobody has looked for a while, or somebody would not be woken.
  redis.call('ZADD', waiting, 'XX', 0, owner)
end
-- The time in microseconds is above every fence given before the counter was lost (restart, flush, expiry), or went back
-- (a restart with older data, a replica that has missed the last ones).
local counted = redis.call('GET', fence) or '0'
if not tonumber(counted) then
  return redis.error_reply('ERR the counter of fencing tokens is not an integer: ' .. fence)
end
local number = math.max(tonumber(counted) + 1, tonumber(ARGV[12]) or now(request))
redis.call('SET', fence, string.format('%.0f', number), 'PX', fence_ttl)
redis.call('SET', KEYS[4 + slot], owner .. holder, 'PX', ttl)
if slot > 0 then
  -- Who has a lower limit has to look there as well, for as long as anything is held there.
  local left = redis.call('PTTL', in_use)
  local known = left > 0 and tonumber(redis.call('GET', in_use)) or 0
  redis.call('SET', in_use, math.max(known, slot + 1), 'PX', math.max(left, ttl))
end
pass_on(freed - 1)
return {1, number, slot}
