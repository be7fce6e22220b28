-- KEYS fence, waiting, done, lock...: one lock, or the slots of a semaphore
-- ARGV owner, heir, holder, ttl ms, fence ttl ms, waiting ms (0: will not wait), ms of the caller's clock, sending (how the
--      holder of a copy begins, behind the 32 characters of the owner; '' where there is none), once (1: look whether
--      this message has been carried out), slots, slot ('': any), seed of the counter of fences ('': the server's time)
-- -> {1, fence, slot} | {0, value, pttl} held | {2, record, pttl} this message has been carried out
-- Follows now.lua. Idempotent by owner: a repeated acquire whose first reply was lost gets the same hold.
local fence, waiting, done = KEYS[1], KEYS[2], KEYS[3]
local owner, heir, holder, ttl, fence_ttl, waiting_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local looked_at, sending, once, slots, wanted = ARGV[7], ARGV[8], ARGV[9], tonumber(ARGV[10]), tonumber(ARGV[11])

if once == '1' then
  local record = redis.pcall('GET', done)
  if type(record) == 'string' then
    return {2, record, redis.call('PTTL', done)}
  end
end

local free, kept, copy, first, first_pttl
for slot = 0, slots - 1 do
  local lock = KEYS[4 + slot]
  local value = redis.call('GET', lock)
  if not value then
    if not wanted or slot == wanted then
      free = free or slot
    end
  else
    local holds = string.sub(value, 1, #owner)
    local asked_for = not wanted or slot == wanted
    if holds == owner and asked_for then
      redis.call('SET', lock, owner .. holder, 'PX', ttl)
      return {1, tonumber(redis.call('GET', fence) or 0), slot}
    elseif holds == heir and asked_for then
      kept = slot
    else
      local pttl = redis.call('PTTL', lock)
      if holds == owner or sending ~= '' and string.sub(value, 33, 32 + #sending) == sending then
        copy = {0, value, pttl}
      elseif not first or pttl < first_pttl then
        first, first_pttl = value, pttl
      end
    end
  end
end

-- Neither two copies of one message beside each other, nor one owner in two slots, also where there is room.
local slot = not copy and (kept or free)
if not slot then
  if waiting_ms ~= '0' then
    redis.call('ZADD', waiting, looked_at, owner)
    redis.call('ZREMRANGEBYSCORE', waiting, '-inf', looked_at - 10 * waiting_ms)
    redis.call('PEXPIRE', waiting, waiting_ms)
  end
  return copy or {0, first or '', first_pttl or 0}
end

if waiting_ms ~= '0' then
  -- It waits no more. Not removed: the key is there until nobody has looked for a while, or somebody would not be woken.
  redis.call('ZADD', waiting, 'XX', 0, owner)
end
local number = redis.call('INCR', fence)
if number == 1 then
  -- No counter: start at the server's time in microseconds, which is above every fence given before the counter was
  -- lost (restart, flush, expiry).
  redis.call('DEL', fence)
  number = tonumber(ARGV[12]) or now(fence)
  redis.call('SET', fence, string.format('%.0f', number), 'PX', fence_ttl)
else
  redis.call('PEXPIRE', fence, fence_ttl)
end
redis.call('SET', KEYS[4 + slot], owner .. holder, 'PX', ttl)
return {1, number, slot}
