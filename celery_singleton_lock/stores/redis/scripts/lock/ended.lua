-- Messages that are over, and of which nothing else needs to be known: those of all locks that share the key, in one text.
-- Each takes ENTRY bytes there: NAME bytes of a digest of its name, and the second since the epoch from which it may be
-- forgotten. What the first text has no room for is in one of 256 other texts, by the first byte of the digest.
-- Follows now.lua.
-- FORGOTTEN: the record of a message of which nothing else is known, as in stores/base.py. MOST: bytes of a text, roughly.
local ENTRY, NAME, MOST, FORGOTTEN = 12, 8, 24576, 'over'

local function second_at(text, at)
  local a, b, c, d = string.byte(text, at, at + 3)
  return ((a * 256 + b) * 256 + c) * 256 + d
end

local function second_now(aside)
  return math.floor(now(aside) / 1000000)
end

-- -> the second until which it is noted there that the message is over; 0 if it is not
local function known_until(ended, name)
  local text = redis.pcall('GET', ended)
  local at, second = 0, 0
  repeat
    at = type(text) == 'string' and string.find(text, name, at + 1, true)
    if at and at % ENTRY == 1 and #text >= at + ENTRY - 1 then
      second = math.max(second, second_at(text, at + NAME))
    end
  until not at
  return second
end

-- -> for how many milliseconds it is known that the message is over; nil if it is not. `aside`: see now.lua.
local function known_for(ended, more, name, aside)
  local second = math.max(known_until(ended, name), known_until(more, name))
  local left = second > 0 and second - second_now(aside) or 0
  return left > 0 and left * 1000 or nil
end

-- -> whether it could be noted there
local function note_in(ended, entry, second, seconds)
  local length = redis.pcall('STRLEN', ended)
  if type(length) ~= 'number' then
    return false
  end
  local some = (string.byte(entry, 2) * 256 + string.byte(entry, 3)) % math.max(math.floor(length / ENTRY), 1) * ENTRY
  -- Now and then, look at any one of the entries (in the texts of `more`, all have the same first byte). If that may be forgotten, remove all that may be,
  -- and also what somebody else has added, which would shift everything behind it.
  if length % ENTRY ~= 0 or length > 0 and (length % (8 * ENTRY) == 0 or length >= MOST)
      and second_at(redis.call('GETRANGE', ended, some + NAME, some + ENTRY - 1), 1) <= second then
    local text, kept = redis.call('GET', ended), {}
    for at = 1, length - ENTRY + 1, ENTRY do
      if second_at(text, at + NAME) > second then
        kept[#kept + 1] = string.sub(text, at, at + ENTRY - 1)
      end
    end
    redis.call('SET', ended, table.concat(kept), 'KEEPTTL')
    length = #kept * ENTRY
  end
  if length >= MOST then
    return false
  end
  redis.call('APPEND', ended, entry)
  if redis.call('PTTL', ended) < seconds * 1000 then
    redis.call('PEXPIRE', ended, seconds * 1000)
  end
  return true
end

-- Notes that the message is over -> whether there was room.
local function note_end(ended, more, name, ms, aside)
  local second, seconds = second_now(aside), math.ceil(ms / 1000) + 1
  local last = second + seconds
  local entry = name .. string.char(
    math.floor(last / 16777216) % 256, math.floor(last / 65536) % 256, math.floor(last / 256) % 256, last % 256)
  return note_in(ended, entry, second, seconds) or note_in(more, entry, second, seconds)
end
