"""How long a lease is trusted, and how its ttl is divided: every share of it, and the reason.

A ttl has three thirds. After the first third, the lease is renewed. In the second third, the renewal is tried again and
again if no answer comes. At the beginning of the last third, it is tried for a last time; then the lease counts as
lost, and the task is stopped before anybody else can have the lock.

Protocol: `docs/protocol.md`, sections 3 to 5.
"""

from __future__ import annotations

from celery_singleton_lock import clock

#: The share of the ttl after which a lease is renewed: two renewals may fail before it can end.
RENEW_AFTER = 1 / 3

#: A lease that is due within this share of its ttl is renewed along with the leases that are due now.
EARLY_SHARE = 1 / 30

#: The share of the ttl that is left when an unrenewed lease is asked for a last time.
GIVE_UP_BEFORE = 1 / 3

#: The share of the ttl that one step of a renewal may take: two steps (connect, read) that begin at the last moment
#: still leave two thirds of the last third to stop the task.
STEP_SHARE = 1 / 20

#: The longest time in seconds that one step may take.
MAX_STEP = 1.0

#: The share of the ttl that the nodes of a Redlock have to answer, and the fewest seconds.
ANSWER_SHARE, MIN_ANSWER = 1 / 20, 0.05

#: The longest pause, as a share of the ttl, before an unanswered renewal is tried again.
RETRY_SHARE = 1 / 20

#: The share of the ttl, and the most seconds, between two tries to stop a task that has lost its lock.
STRIKE_SHARE, MAX_STRIKE_INTERVAL = 1 / 40, 0.25

#: The share of the ttl that a body has to end by itself after `Aborted` was first raised in it. With `GIVE_UP_BEFORE`,
#: it ends before the lease does.
GRACE_SHARE = 1 / 10

#: The share of the ttl that is left when a lease counts as lost: a last renewal has had time for two steps. It may need
#: more: for TLS, for a login, to send a script once more to a server that was restarted.
LOST_BEFORE = GIVE_UP_BEFORE - 2 * STEP_SHARE

#: The share of the ttl that is left when a holder has stopped because it could not renew its lease: about a tenth. The
#: last strike comes a little after the grace period.
STOPPED_BEFORE = LOST_BEFORE - GRACE_SHARE - STRIKE_SHARE

#: How much two clocks may differ in rate over a lease: a share of the ttl, and the resolution of the server's clock in
#: seconds. From the description of Redlock (https://redis.io/docs/latest/develop/use/patterns/distributed-locks/).
DRIFT_SHARE, RESOLUTION = 0.01, 0.002


def end_of(sent_at: float, ttl: float) -> float:
    """Until when to trust a hold that lasts for `ttl` seconds on a server and was requested at `sent_at`, on
    `clock.now()`.

    The server counts from some moment after `sent_at`, so the holder always stops trusting first.
    """
    return sent_at + ttl - (ttl * DRIFT_SHARE + RESOLUTION)


def came_in_time(sent_at: float, ttl: float) -> bool:
    """Whether a grant that was requested at `sent_at` comes early enough to start work: its renewal is not due yet."""
    return clock.now() - sent_at < ttl * RENEW_AFTER


def seconds_until_over(remaining: float) -> float:
    """Seconds after which a hold has ended, from its remaining time by the server, which counts milliseconds."""
    return remaining + RESOLUTION


def step_of(ttl: float) -> float:
    """Seconds that one step of a renewal may take, for leases with this ttl or a longer one."""
    return min(MAX_STEP, ttl * STEP_SHARE)
