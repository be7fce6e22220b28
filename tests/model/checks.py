"""The checks: each model as the code is, and variants that each leave one thing out."""

from __future__ import annotations

from functools import partial

from tests.model.spin import Check

#: Restarts and late requests multiply the states: checks that need neither do without.
_CALM = ("RESTARTS=0", "LATE=0")
_FENCES = ("FENCES", "SEEDS=3", "SLOW=0")
#: No newcomer arrives while a wake-up is passed on.
_IN_ORDER = ("FAULTS=0", "COMING=3", "OVERTAKEN=0")

SOUND = (
    Check("lease", "a trusted lease is held, one body at a time, a given-up request takes nothing", depth=5_000_000),
    Check("lease", "a lock is free again and again", ("SLOW=0",), liveness=True, depth=5_000_000, long=True),
    Check("redelivery", "one end for each message, and no body after it", ("REDELIVERIES=4", "DEATHS=3")),
    Check("redelivery", "a message ends, and all of its copies", liveness=True),
    Check("waiters", "a freed lock is taken, and an unheard end costs a second", ("FAULTS=3",)),
    Check("waiters", "the same, after any number of faults", ("SECOND=1",), depth=5_000_000),
    Check("waiters", "the same, where others come between a wake-up and its acquire", ("FAULTS=2", "GAP")),
    Check("waiters", "nobody overtakes a blocked waiter", ("FAULTS=0", "OVERTAKEN=0")),
    Check("waiters", "after one fault, at most one overtakes", ("FAULTS=1", "OVERTAKEN=1")),
    Check("waiters", "every waiter gets the lock in the end", ("FAULTS=2", "PATIENT"), liveness=True),
    Check("line", "a freed lock is taken, and an unheard end is found", ("FAULTS=1",)),
    Check("line", "the oldest place is first", _IN_ORDER),
    Check("line", "a copy in line begins in the end", ("FAULTS=1", "COMING=4", "PATIENT"), liveness=True),
    Check("redlock", "one trusted lease; one request may be late", ("RESTARTS=0",)),
    Check("redlock", "the same, for a lease that is renewed twice", ("RENEWALS=2", "RESTARTS=0"), long=True),
    Check("redlock", "one trusted lease; one node comes back empty", ("LATE=0",)),
    Check("redlock", "fences grow, whatever the clocks of the clients say", (*_CALM, *_FENCES), long=True),
)

_lease = partial(Check, "lease", broken=True)
_redelivery = partial(Check, "redelivery", broken=True)
_redlock = partial(Check, "redlock", broken=True)
_waiters = partial(Check, "waiters", broken=True)
_line = partial(Check, "line", broken=True)

BROKEN = (
    _lease("trust counts from the answer", ("TRUST_FROM_ANSWER",)),
    _lease("the clocks differ by more than trust allows for", ("SLOW=2",)),
    _lease("free does not check whose hold it is", ("FREE_UNCHECKED",), shortest=False, depth=140),
    _lease("renew creates what is not there", ("RENEW_CREATES",), shortest=False, depth=120),
    _lease("the server does not remember a token that was given up", ("NO_OVER",)),
    _lease("a request arrives after the server has forgotten that its token is over", ("OVER_TOO_SHORT",)),
    _lease("a grant to a second try leaves no tombstone", ("NO_TOMBSTONE_AT_GRANT",)),
    _lease("a second try that is refused leaves no tombstone", ("REFUSED_WITHOUT_TOMBSTONE",)),
    _lease("a process is paused past the end of its lease", ("PAUSE",)),
    _lease("a hold has no time to live", ("HOLD_WITHOUT_TTL", "SLOW=0"), liveness=True),
    _redelivery("the record is written before the body ends", ("RECORD_BEFORE_BODY",)),
    _redelivery("acquire does not look for the record", ("ACQUIRE_IGNORES_RECORD",)),
    _redelivery("a refusal does not look for a copy that runs", ("REFUSE_IGNORES_HOLD",)),
    _redelivery("a refusal does not look for the record", ("REFUSE_IGNORES_RECORD",)),
    _redelivery("a refusal leaves no record", ("REFUSAL_NOT_RECORDED",)),
    _redelivery("a copy is acknowledged before it is put back", ("ACKNOWLEDGED_FIRST",)),
    _redelivery("the result is stored before the record is written", ("TELL_BEFORE_RECORD",)),
    _redelivery("the end of a body is not answered until its hold has ended", ("LONG_SILENCE",)),
    _redelivery("the record ends before the last copy comes", ("RECORD_TOO_SHORT",)),
    _redelivery("the hold of a worker that died never ends", ("HOLD_OUTLIVES_WORKER",), liveness=True),
    _waiters("a hand-over does not check whether its waiter has left", ("HAND_OVER_IGNORES_END", "FAULTS=2")),
    _waiters(
        "a hand-over does not check whether its waiter has the lock", ("HAND_OVER_IGNORES_HOLD", "FAULTS=1", "GAP")
    ),
    _waiters("a late request does not look for the end of its waiter", ("LATE_IGNORES_END", "FAULTS=2")),
    _waiters("a waiter that leaves the line with the lock frees it", ("LEAVING_FREES", "FAULTS=2")),
    _waiters("a lock that is handed over is trusted unconfirmed", ("NOT_CONFIRMED", "FAULTS=2")),
    _waiters("a lock that is handed over lasts for a ttl", ("HANDED_OVER_FOR_TTL", "FAULTS=2")),
    _waiters("a release wakes nobody", ("FREE_WAKES_NOBODY", "FAULTS=2")),
    _waiters("the wake-up of a waiter that has left is not passed on", ("WAKE_UP_NOT_PASSED_ON", "FAULTS=2")),
    _waiters("a wake-up is not kept for a waiter that is about to block", ("WAKE=0", "FAULTS=2")),
    _waiters("the server forgets a waiter before that waiter looks again", ("WAITING=1", "FAULTS=2")),
    _waiters("a waiter does not look by itself", ("NEVER_LOOKS", "FAULTS=2")),
    _waiters("a wake-up stays when the lock is taken", ("WAKE_UP_STAYS", "FAULTS=0", "OVERTAKEN=0")),
    _waiters("a look costs a waiter its place", ("BLOCKS_ANEW", "FAULTS=0", "OVERTAKEN=0")),
    _waiters("others come between a wake-up and its acquire", ("GAP", "FAULTS=0", "OVERTAKEN=5")),
    _line("a release wakes nobody", ("FREE_WAKES_NOBODY", "FAULTS=1")),
    _line("a copy that was revoked does not give back", ("NOT_GIVEN_BACK", "FAULTS=1")),
    _line("a process that leaves drops a wake-up that was passed on too often", ("LEAVES_WITH_LAST", "FAULTS=1")),
    _line("a process does not look by itself", ("NEVER_LOOKS", "FAULTS=1")),
    _line("a process that is woken does not look for an older place", ("TAKES_IN_ANY_ORDER", *_IN_ORDER)),
    _line("a wake-up is passed on forever", ("PASSED_ON_FOR_EVER", "FAULTS=1", "COMING=4", "PATIENT"), liveness=True),
    _redlock("a node that came back empty votes at once", ("AMNESIA_VOTES", "LATE=0")),
    _redlock("trust counts from the answer", ("TRUST_FROM_ANSWER", *_CALM), long=True),
    _redlock("an attempt is taken back without a check which one it was", ("UNDO_OF_ANY_ATTEMPT", *_CALM)),
    _redlock("a renewal counts with one node", ("RENEWED_BY_ONE", *_CALM), shortest=False, depth=300),
    _redlock("a hold that was freed is put back", ("PUT_BACK_AFTER_END", "LATE=0"), shortest=False, depth=300),
    _redlock("fences are not raised on a majority", ("FENCE_NOT_RAISED", *_CALM, *_FENCES), long=True),
    _redlock("a node forgets its counter, and clocks differ", ("LATE=0", *_FENCES), shortest=False, long=True),
)
