"""The checks: each model as the code is, and variants that each leave one thing out."""

from __future__ import annotations

from functools import partial

from tests.model.spin import Check

#: Restarts and late requests multiply the states: checks that need neither do without.
_CALM = ("RESTARTS=0", "LATE=0")
_FENCES = ("FENCES", "SEEDS=3", "SLOW=0")

SOUND = (
    Check("lease", "a trusted lease is held, one body at a time, a given-up request takes nothing", depth=5_000_000),
    Check("lease", "a lock is free again and again", ("SLOW=0",), liveness=True, depth=5_000_000, long=True),
    Check("redelivery", "one end for each message, and no body after it", ("REDELIVERIES=4", "DEATHS=3")),
    Check("redelivery", "a message ends, and all of its copies", liveness=True),
    Check("waiting", "a freed lock is taken at once, and in order", ("FAULTS=0",)),
    Check("waiting", "a lost wake-up, and a waiter that dies, cost two seconds", ("FAULTS=2",)),
    Check("waiting", "every waiter gets the lock in the end", ("FAULTS=1", "PATIENT"), liveness=True),
    Check("redlock", "one trusted lease; one request may be late", ("RESTARTS=0",)),
    Check("redlock", "the same, for a lease that is renewed twice", ("RENEWALS=2", "RESTARTS=0"), long=True),
    Check("redlock", "one trusted lease; one node comes back empty", ("LATE=0",)),
    Check("redlock", "fences grow, whatever the clocks of the clients say", (*_CALM, *_FENCES), long=True),
)

_lease = partial(Check, "lease", broken=True)
_redelivery = partial(Check, "redelivery", broken=True)
_redlock = partial(Check, "redlock", broken=True)
_waiting = partial(Check, "waiting", broken=True)

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
    _waiting("a release wakes nobody", ("FREE_WAKES_NOBODY", "FAULTS=0")),
    _waiting("a waiter does not look by itself", ("NEVER_LOOKS", "FAULTS=1")),
    _waiting("a look does not ask who has waited for longer", ("TAKES_IN_ANY_ORDER", "FAULTS=0")),
    _waiting("a waiter that is dead is woken again and again", ("DEAD_FOR_EVER", "FAULTS=1")),
    _waiting("a waiter that was woken leaves, and nobody is told", ("LEAVES_SILENTLY", "FAULTS=0")),
    _redlock("a node that came back empty votes at once", ("AMNESIA_VOTES", "LATE=0")),
    _redlock("trust counts from the answer", ("TRUST_FROM_ANSWER", *_CALM), long=True),
    _redlock("an attempt is taken back without a check which one it was", ("UNDO_OF_ANY_ATTEMPT", *_CALM)),
    _redlock("a renewal counts with one node", ("RENEWED_BY_ONE", *_CALM), shortest=False, depth=300),
    _redlock("a hold that was freed is put back", ("PUT_BACK_AFTER_END", "LATE=0"), shortest=False, depth=300),
    _redlock("fences are not raised on a majority", ("FENCE_NOT_RAISED", *_CALM, *_FENCES), long=True),
    _redlock("a node forgets its counter, and clocks differ", ("LATE=0", *_FENCES), shortest=False, long=True),
)
