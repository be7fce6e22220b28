-- What an acquire behind its waiter's BLPOP looks at first; acquire.lua follows this text.
-- Follows request.lua and places.lua.
-- -> {GIVEN_UP} it is not wanted any more | what acquire.lua answers
-- Or the owner has asked again meanwhile, and got it.
if redis.call('EXISTS', tombstone) == 1 or is_held_by(owner) then
  -- It was woken all the same: somebody else needs the wake-up.
  wake_others(1)
  return {GIVEN_UP}
end
is_handed_over = true
