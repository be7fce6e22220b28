-- KEYS counts, entries, last, refused, scratch
-- ARGV lifetime ms, entries kept, keys remembered, number of counts, (field, count)..., (kind, key, began ms, ended ms,
--      slack ms, fence, entry)...
-- -> {now us, {refusals in a row, ...}, {the entry of a run that overlaps, or '', ...}} for each entry
-- Follows now.lua. Kinds: run; turn (one of a semaphore's); refusal; note (anything else).
local counts, entries, last, refused = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local lifetime, kept, remembered, fields = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])

for i = 5, 3 + 2 * fields, 2 do
  redis.call('HINCRBY', counts, ARGV[i], ARGV[i + 1])
end

local rows, overlaps = {}, {}
for i = 5 + 2 * fields, #ARGV, 7 do
  local kind, key, began, ended = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local slack, fence, entry = tonumber(ARGV[i + 4]), ARGV[i + 5], ARGV[i + 6]
  local row, overlap = 0, ''
  redis.call('XADD', entries, 'MAXLEN', '~', kept, '*', 'e', entry)
  if kind == 'refusal' then
    row = redis.call('HINCRBY', refused, key, 1)
  elseif kind == 'run' or kind == 'turn' then
    redis.call('HDEL', refused, key)
  end
  if kind == 'run' then
    local known = redis.call('HGET', last, key) or ''
    local b, e, s, f, other = string.match(known, '^(%S+) (%S+) (%S+) (%S+) (.*)$')
    b, e, s = tonumber(b), tonumber(e), tonumber(s)
    if e and f ~= fence and math.min(e, ended) - math.max(b, began) > s + slack then
      overlap = other
    end
    if not e or ended > e then
      redis.call('HSET', last, key, table.concat({ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], fence, entry}, ' '))
    end
  end
  rows[#rows + 1], overlaps[#overlaps + 1] = row, overlap
end

-- Of so many keys nobody needs to know all: start anew.
for _, hash in ipairs({last, refused}) do
  if redis.call('HLEN', hash) > remembered then
    redis.call('DEL', hash)
  end
end
for i = 1, 4 do
  redis.call('PEXPIRE', KEYS[i], lifetime)
end
return {now(KEYS[5]), rows, overlaps}
