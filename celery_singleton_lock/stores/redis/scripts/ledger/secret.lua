-- KEYS secret  ARGV value ('': only look), lifetime ms
-- -> the secret; '' if there is none
-- The greater one stays, so that all that ask a majority of the nodes of a Redlock end up with the same.
local known = redis.call('GET', KEYS[1]) or ''
if ARGV[1] > known then
  known = ARGV[1]
  redis.call('SET', KEYS[1], known, 'PX', ARGV[2])
end
return known
