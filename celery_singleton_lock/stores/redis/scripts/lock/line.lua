-- The waiters of a lock: `waiting` has them by since when each waits; `asked` has when each asked last (ms of the server's clock), and behind that for
-- how many copies. A place is kept until its waiter leaves: whoever asks takes it again.
-- Follows now.lua.
-- LIVE_MS: a waiter that has not asked for so long may be gone. COMES_MS: how long a free lock is left to the waiter that was woken. KEPT_MS: how long
-- the places outlive the last question. MANY: how many are looked at.
local LIVE_MS, COMES_MS, KEPT_MS, MANY = 4000, 1000, 10000, 100

local function enrol(waiting, asked, member, since, copies)
  redis.call('ZADD', waiting, since, member)
  redis.call('HSET', asked, member, string.format('%.0f %s', math.floor(now() / 1000), copies))
  redis.call('PEXPIRE', waiting, KEPT_MS)
  redis.call('PEXPIRE', asked, KEPT_MS)
end

local function leave(waiting, asked, member)
  redis.pcall('ZREM', waiting, member)
  redis.pcall('HDEL', asked, member)
end

-- -> when it asked last; 0 if that is not known; and all that is known
local function asked_at(asked, member)
  local said = redis.pcall('HGET', asked, member)
  return type(said) == 'string' and tonumber(string.match(said, '^%d+')) or 0, said
end

-- Whether a waiter is there. If one is not, as it did not come when it was woken, its process is gone, with those that have not asked since.
-- gone: by process, since when; for all that are looked at, the first one first
-- -> whether it is; when it asked last; and all that is known
local function is_there(asked, member, time, gone)
  local at, said = asked_at(asked, member)
  local process = string.match(member, '^.*|') or ''
  if process == '' or at > time then
    at = 0 -- A stranger's; or by another server's clock, and who is there asks again.
  end
  if at + LIVE_MS <= time then
    gone[process] = math.max(gone[process] or 0, at + LIVE_MS - COMES_MS)
  end
  return at > math.max(gone[process] or 0, time - LIVE_MS), at, said
end

-- How many that are there have waited for longer.
local function count_before(waiting, asked, member, since)
  local count, time, gone = 0, math.floor(now() / 1000), {}
  for _, other in ipairs(redis.pcall('ZRANGEBYSCORE', waiting, '-inf', '(' .. since, 'LIMIT', 0, MANY)) do
    if other ~= member and is_there(asked, other, time, gone) then
      count = count + 1
    end
  end
  return count
end

-- The waiter to wake: the first one that is there, and was not woken for each of its copies since it asked; if all were, the first one again. If it
-- does not ask in time, it is not there.
-- -> its name; nil if nobody waits
local function next_waiter(waiting, asked)
  local time, gone, again = math.floor(now() / 1000), {}
  for _, member in ipairs(redis.pcall('ZRANGE', waiting, 0, MANY)) do
    local is_here, at, said = is_there(asked, member, time, gone)
    local copies = is_here and tonumber(string.match(said, ' (%d+)$')) or 0
    if copies > 0 then
      at = math.min(at, time - LIVE_MS + COMES_MS)
      redis.call('HSET', asked, member, string.format('%.0f %.0f', at, copies - 1))
      return member
    elseif is_here then
      again = again or member
    else
      leave(waiting, asked, member)
    end
  end
  return again
end
