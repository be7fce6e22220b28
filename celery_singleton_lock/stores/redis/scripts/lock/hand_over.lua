-- What an acquire behind its waiter's BLPOP looks at first; acquire.lua follows this text.
-- Follows request.lua and places.lua.
-- -> {GIVEN_UP} it is not wanted any more | what acquire.lua answers
local gone = redis.call('EXISTS', over, request) ~= 0
for slot = 0, slots - 1 do
  -- The owner has asked again meanwhile, and got it.
  gone = gone or holds(slot, owner)
end
if gone then
  -- It was woken all the same: somebody else needs the wake-up.
  wake_others(1)
  return {GIVEN_UP}
end
is_handed_over = true
