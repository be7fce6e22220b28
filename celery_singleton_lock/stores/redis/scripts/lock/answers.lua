-- The first part of an answer: `Answer` in lock_answers.py.
local HELD, GRANTED, RECORD, NO_VOTE, GIVEN_UP, NEWEST, SUPERSEDED = 0, 1, 2, 3, 4, 5, 6
