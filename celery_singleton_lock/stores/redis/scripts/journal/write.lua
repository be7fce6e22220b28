-- KEYS counts, entries, last, refused, labels, scratch
-- ARGV lifetime ms, entries kept, keys remembered, labels kept, number of counts, (field, coarse field or '', count)...,
--      (kind, key, began ms, ended ms, slack ms, fence, entry)...
-- -> {now us, {refusals in a row, ...}, {the entry of a run that overlaps, or '', ...}} for each entry
-- Follows now.lua. Kinds: run; turn (one of a semaphore's); refusal; note (anything else).
local counts, entries, last, refused, labels = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local lifetime, kept, remembered, most = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local first = 6 + 3 * tonumber(ARGV[5])

-- A value that somebody else has put in place of these keys would be in the way for good.
for i, kind in ipairs({'hash', 'stream', 'hash', 'hash', 'zset'}) do
  local found = redis.call('TYPE', KEYS[i]).ok
  if found ~= kind and found ~= 'none' then
    redis.call('DEL', KEYS[i])
  end
end
local at = now(KEYS[6])

local function grow(hash, field, by)
  local grown = redis.pcall('HINCRBY', hash, field, by)
  if type(grown) == 'number' then
    return grown
  end
  redis.call('HSET', hash, field, by)  -- It was no number.
  return tonumber(by)
end

for i = 6, first - 1, 3 do
  local field, coarse = ARGV[i], ARGV[i + 1]
  grow(counts, field, ARGV[i + 2])
  if coarse ~= '' then
    redis.call('ZADD', labels, at, coarse .. '\0' .. field)
  end
end
-- A message names its label: if there are too many, those that were used the longest ago are counted together.
local over = redis.call('ZCARD', labels) - most
if over > 0 then
  for _, label in ipairs(redis.call('ZRANGE', labels, 0, over - 1)) do
    local coarse, field = string.match(label, '^(%Z*)%z(.*)$')
    local count = field and redis.call('HGET', counts, field)
    if count then
      redis.call('HDEL', counts, field)
      redis.pcall('HINCRBY', counts, coarse, count)
    end
  end
  redis.call('ZREMRANGEBYRANK', labels, 0, over - 1)
end

local rows, overlaps = {}, {}
for i = first, #ARGV, 7 do
  local kind, key, began, ended = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local slack, fence, entry = tonumber(ARGV[i + 4]), ARGV[i + 5], ARGV[i + 6]
  local row, overlap = 0, ''
  redis.pcall('XADD', entries, 'MAXLEN', '~', kept, '*', 'e', entry)
  if kind == 'refusal' then
    row = grow(refused, key, 1)
  elseif kind == 'run' or kind == 'turn' then
    redis.call('HDEL', refused, key)
  end
  if kind == 'run' then
    local known = redis.call('HGET', last, key) or ''
    local b, e, s, f, other = string.match(known, '^(%S+) (%S+) (%S+) (%S+) (.*)$')
    b, e, s = tonumber(b), tonumber(e), tonumber(s)
    if b and e and s and f ~= fence and math.min(e, ended) - math.max(b, began) > s + slack then
      overlap = other
    end
    if not (b and e and s) or ended > e then
      redis.call('HSET', last, key, table.concat({ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], fence, entry}, ' '))
    end
  end
  rows[#rows + 1], overlaps[#overlaps + 1] = row, overlap
end

-- Nobody needs to know that many keys: start anew.
for _, hash in ipairs({last, refused}) do
  if redis.call('HLEN', hash) > remembered then
    redis.call('DEL', hash)
  end
end
for i = 1, 5 do
  redis.call('PEXPIRE', KEYS[i], lifetime)
end
return {at, rows, overlaps}
