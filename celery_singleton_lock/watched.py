"""A lease that is watched: when to act, and what a renewal has changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

from celery_singleton_lock import chance, clock, trust
from celery_singleton_lock.lease import Lease

#: Why a lease was lost that the store no longer has.
GONE = "the store does not have it any more: it ended, was taken over, or was deleted"


@dataclass(slots=True, eq=False)
class Watched:
    """A lease under watch. Written under the heartbeat's mutex after it was added.

    Attributes:
        lease: weak, so that an execution which was torn down without saying goodbye (a time limit that struck in its
            last line) is not renewed forever.
        on_lost: see `weakly`.
        due_at: when to renew it; once it is lost, when to say so.
        linger: seconds for which the thread stays when this was the last one.
        strikes_at: when to say again that its holder is to stop, once a newer task is to run; the lease is
            renewed meanwhile.
    """

    lease: weakref.ref[Lease]
    on_lost: Callable[[], None]
    due_at: float
    linger: float
    strikes_at: float = 0.0

    def next_at(self, *, under_way: bool) -> float:
        """When to do something: renew it, give it up while a renewal is under way, or say that it is lost, or that its
        holder is to stop.
        """
        lease = self.lease()
        if lease is None:
            return 0.0
        due_at = lease.give_up_at if under_way and lease.reason is None else self.due_at
        return due_at if lease.superseded_by is None or lease.reason is not None else min(due_at, self.strikes_at)

    def is_to_stop(self, lease: Lease, now: float) -> bool:
        """Whether to say now that its holder is to stop for a newer task."""
        return lease.superseded_by is not None and lease.reason is None and self.strikes_at <= now

    def strike(self, lease: Lease, now: float) -> None:
        """That is said now, and again after a while."""
        again_at = now + min(trust.MAX_STRIKE_INTERVAL, lease.ttl * trust.STRIKE_SHARE)
        if lease.reason is None:
            self.strikes_at = again_at
        else:
            self.due_at = again_at

    def is_due(self, now: float) -> bool:
        """Whether to renew it now, or nearly."""
        lease = self.lease()
        if lease is None or lease.reason is not None:
            return False
        return self.due_at <= now + lease.good_for * trust.RENEW_AFTER * trust.COALESCE

    def lose(self, lease: Lease, reason: str) -> None:
        """It is lost, which is said at once."""
        lease.lose(reason)
        self.due_at = 0.0

    def try_again_or_give_up(self, lease: Lease, error: Exception) -> None:
        """A renewal was not answered."""
        now = clock.now()
        lease.doubt(lease.ttl, now)  # It may be carried out when the lease has another ttl.
        give_up_at = lease.give_up_at
        if now >= give_up_at:
            self.lose(lease, f"it could not be renewed in time: {error}")
        else:
            pause = chance.spread(min(0.5, lease.good_for * trust.RETRY_SHARE))
            self.due_at = min(now + pause, give_up_at)


def weakly(call: Callable[[], None]) -> Callable[[], None]:
    """The same call; a bound method's does nothing once its object is gone, and does not keep it."""
    # Not `weakref.WeakMethod`: there may be many, and that takes half a kilobyte.
    return partial(_call, weakref.ref(call.__self__), call.__func__) if isinstance(call, MethodType) else call


def due_after(lease: Lease) -> float:
    """When to renew a lease that has just been."""
    # From when it was sent: a process that was stopped in between reads an answer that says little by now.
    return lease.trusted_until - lease.good_for * (1 - chance.spread(trust.RENEW_AFTER, least=0.9))


def _call(subject: weakref.ref[Any], method: Callable[[Any], None]) -> None:
    if (alive := subject()) is not None:
        method(alive)
