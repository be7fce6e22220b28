"""How long a lease is trusted, and how its ttl is divided: every share of it, and the reason.

A ttl is spent in thirds. After the first one the lease is renewed; in the second one that is tried again and again
while no answer comes; with the last one the lease counts as lost, and the task is stopped in it, before anybody else
can have the lock.

Protocol: `docs/protocol.md`, sections 3 to 5.
"""

from __future__ import annotations

from collections.abc import Iterable

from celery_singleton_lock import clock

#: The share of the ttl after which a lease is renewed: two renewals may fail before it can end.
RENEW_AFTER = 1 / 3

#: What is due within this share of its renewal interval is renewed along with what is due now.
COALESCE = 0.1

#: The share of the ttl that is left when an unrenewed lease counts as lost.
GIVE_UP_BEFORE = 1 / 3

#: The share of the ttl that one step of a renewal may take: two steps (connect, read) that began at the last moment
#: still leave two thirds of the last third to stop the task in.
STEP_SHARE = 1 / 20

#: Seconds that one step may take at most.
MAX_STEP = 1.0

#: The share of the ttl that a step may take of a renewal that its caller waits for, and no other lease.
OWN_STEP_SHARE = 1 / 3

#: The share of the ttl that the nodes of a Redlock get to answer, and the seconds at least.
ANSWER_SHARE, MIN_ANSWER = 1 / 20, 0.05

#: The share of the ttl that is waited, at most, before a renewal is tried again that was not answered.
RETRY_SHARE = 1 / 20

#: The share of the ttl, and the seconds at most, between two tries to stop a task that has lost its lock.
STRIKE_SHARE, MAX_STRIKE_INTERVAL = 1 / 40, 0.25

#: The share of the ttl that a body gets to end by itself after `Aborted` was first raised in it. With `GIVE_UP_BEFORE`
#: it is over before the lease is.
GRACE_SHARE = 1 / 10

#: The share of the ttl that is left when a holder that could not renew its lease has stopped: about a tenth. The last
#: try has two steps, and the last strike comes a little after the grace is over.
STOPPED_BEFORE = GIVE_UP_BEFORE - 2 * STEP_SHARE - GRACE_SHARE - STRIKE_SHARE

#: What two clocks may differ in rate over a lease: a share of it, and the resolution of the server's, in seconds. From
#: the description of Redlock (https://redis.io/docs/latest/develop/use/patterns/distributed-locks/).
DRIFT_SHARE, RESOLUTION = 0.01, 0.002


def end_of(sent_at: float, ttl: float) -> float:
    """Until when to trust what lasts for `ttl` seconds on a server, and was asked for at `sent_at`, on `clock.now()`.

    The server counts from some moment after that, so the holder always stops trusting first.
    """
    return sent_at + ttl - (ttl * DRIFT_SHARE + RESOLUTION)


def came_in_time(sent_at: float, ttl: float) -> bool:
    """Whether a grant that was asked for at `sent_at` comes early enough to start work on: no renewal is due yet."""
    return clock.now() - sent_at < ttl * RENEW_AFTER


def renewed_at(trusted_until: float, ttl: float) -> float:
    """When to renew a lease that is trusted until then."""
    return trusted_until - ttl * (1 - RENEW_AFTER)


def seconds_until_over(remaining: float) -> float:
    """Seconds after which a hold is over, of its remaining time as a server has said it: it counts milliseconds."""
    return remaining + RESOLUTION


def step_of(ttls: Iterable[float]) -> float:
    """Seconds that one step of a renewal may take, for leases with these ttls."""
    return min(MAX_STEP, min(ttls) * STEP_SHARE)
