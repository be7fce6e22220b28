-- KEYS lock, fence, waiting, done (the last one is missing where there is no message)
-- ARGV owner, heir, holder, ttl ms, fence ttl ms, waiting ms (0: will not wait)
-- -> {1, fence} | {0, value, pttl} held | {2, record, pttl} this message has been carried out
-- Idempotent by owner: a repeated acquire whose first reply was lost gets the same hold.
local lock, fence, waiting, done = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local owner, heir, holder, ttl, fence_ttl, waiting_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

if done then
  local record = redis.pcall('GET', done)
  if type(record) == 'string' then
    return {2, record, redis.call('PTTL', done)}
  end
end

local value = redis.call('GET', lock)
if value then
  local holds = string.sub(value, 1, #owner)
  if holds == owner then
    redis.call('PEXPIRE', lock, ttl)
    return {1, tonumber(redis.call('GET', fence) or 0)}
  end
  -- Kept for the next attempt of a task, which this is.
  if holds ~= heir then
    if waiting_ms ~= '0' then
      redis.call('SET', waiting, 1, 'PX', waiting_ms)
    end
    return {0, value, redis.call('PTTL', lock)}
  end
end

local number = redis.call('INCR', fence)
if number == 1 then
  -- No counter: start at the server's time in microseconds, which is above every fence given before the counter was
  -- lost (restart, flush, expiry). TIME lies outside of +@read +@write; where it is refused, a stream id tells the time
  -- to the millisecond.
  redis.call('DEL', fence)
  local time = redis.pcall('TIME')
  if time.err then
    number = tonumber(string.match(redis.call('XADD', fence, '*', 't', ''), '^%d+')) * 1000
    redis.call('DEL', fence)
  else
    number = time[1] * 1000000 + time[2]
  end
  redis.call('SET', fence, string.format('%.0f', number), 'PX', fence_ttl)
else
  redis.call('PEXPIRE', fence, fence_ttl)
end
redis.call('SET', lock, owner .. holder, 'PX', ttl)
return {1, number}
