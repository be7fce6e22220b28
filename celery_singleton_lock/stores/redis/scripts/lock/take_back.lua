-- KEYS done  ARGV record
-- -> 1 forgotten | 0 it is not there
-- Takes back, on one node of a Redlock, a refusal that others have not agreed to.
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
