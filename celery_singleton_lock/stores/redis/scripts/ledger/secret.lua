-- KEYS secret  ARGV value ('': only look), lifetime ms, raise (1: a greater value takes the place of a smaller one)
-- -> the secret; '' if there is none
-- The greater one stays, so that all that ask a majority of the nodes of a Redlock end up with the same.
local known = redis.call('GET', KEYS[1])
if ARGV[1] ~= '' and (not known or ARGV[3] == '1' and ARGV[1] > known) then
  known = ARGV[1]
  redis.call('SET', KEYS[1], known, 'PX', ARGV[2])
elseif known then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return known or ''
