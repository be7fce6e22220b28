-- Messages that are over, and of which no more than that is to be known: of all locks that share the key, in one text. Each
-- has ENTRY bytes there: eight of a digest of its name, and the second since the epoch at which it is forgotten.
-- Follows now.lua.
-- The record of a message of which no more is known: `FORGOTTEN` in stores/base.py.
local ENTRY, NAME, FORGOTTEN = 12, 8, 'over'

local function second_at(text, at)
  local a, b, c, d = string.byte(text, at, at + 3)
  return ((a * 256 + b) * 256 + c) * 256 + d
end

-- -> for how many milliseconds it is known that the message is over; nil if it is not. `aside`: see now.lua.
local function known_for(ended, name, aside)
  local text = redis.pcall('GET', ended)
  if type(text) ~= 'string' then
    return nil
  end
  local at, until_ = 0, 0
  repeat
    at = string.find(text, name, at + 1, true)
    if at and at % ENTRY == 1 and #text >= at + ENTRY - 1 then
      until_ = math.max(until_, second_at(text, at + NAME))
    end
  until not at
  local left = until_ > 0 and until_ - math.floor(now(aside) / 1000000) or 0
  return left > 0 and left * 1000 or nil
end

-- Notes that the message is over -> whether it could. Where a quarter of what was noted earlier seems to be forgotten, all
-- that is forgotten is taken out.
local function note_end(ended, name, ms, aside)
  local second = math.floor(now(aside) / 1000000)
  local last = second + math.ceil(ms / 1000) + 1
  local entry = name .. string.char(
    math.floor(last / 16777216) % 256, math.floor(last / 65536) % 256, math.floor(last / 256) % 256, last % 256)
  local length = redis.pcall('APPEND', ended, entry)
  if type(length) ~= 'number' then
    return false
  end
  if length % ENTRY ~= 0 then
    -- What somebody else has added would shift all that comes behind it.
    local whole = math.floor((length - ENTRY) / ENTRY) * ENTRY
    redis.call('SET', ended, string.sub(redis.call('GET', ended), 1, whole) .. entry, 'KEEPTTL')
  end
  local quarter = math.floor(length / ENTRY / 4) * ENTRY
  if length % (8 * ENTRY) == 0 and second_at(redis.call('GETRANGE', ended, quarter + NAME, quarter + ENTRY - 1), 1) <= second then
    local text, kept = redis.call('GET', ended), {}
    for at = 1, #text - ENTRY + 1, ENTRY do
      if second_at(text, at + NAME) > second then
        kept[#kept + 1] = string.sub(text, at, at + ENTRY - 1)
      end
    end
    redis.call('SET', ended, table.concat(kept), 'KEEPTTL')
  end
  local needed = (last - second) * 1000
  if redis.call('PTTL', ended) < needed then
    redis.call('PEXPIRE', ended, needed)
  end
  return true
end
