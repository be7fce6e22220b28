"""A watched lease: when to act, and what a renewal changes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, TypeVar

from celery_singleton_lock import chance, clock, trust
from celery_singleton_lock.lease import Lease

#: Why a lease that the store no longer has was lost.
GONE = "the store no longer has it: it ended, was taken over, or was deleted"

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Watched:
    """A lease under watch. Written under the heartbeat's mutex after it was added.

    Attributes:
        lease: a weak reference, so that an execution that was torn down without cleaning up (by a time limit in its
            last line) is not renewed forever.
        on_lost: see `weakly`.
        due_at: when to renew the lease; once it is lost, when to report that.
        linger: seconds for which the thread stays if this was the last lease.
        every: the most seconds between two renewals.
        strikes_at: when to ask its holder again to stop, once a newer task should run; the lease is renewed meanwhile.
        words: whose lease it is, see `weakly`; None if only its key is known.
        on_moved: called when the time at which the lease is given up has changed, see `weakly`.
        said: the last such time for which it was called.
        asked_at: when the last renewal began; if that was a further try, when the first one began that had no answer.
        asked_after: how many renewals had been answered by then; -1 if there was none.
    """

    lease: weakref.ref[Lease]
    on_lost: Callable[[], None]
    due_at: float
    linger: float
    every: float
    strikes_at: float = 0.0
    words: Callable[[], str | None] | None = None
    on_moved: Callable[[], object] | None = None
    said: float = 0.0
    asked_at: float = 0.0
    asked_after: int = -1

    @property
    def give_up_at(self) -> float:
        """When the lease is given up unless it is renewed; infinite once it is lost or forgotten."""
        lease = self.lease()
        return math.inf if lease is None or lease.reason is not None else lease.give_up_at

    def in_words(self) -> str:
        """Whose lease it is, for people."""
        lease = self.lease()
        key = "" if lease is None else lease.key
        whose = None if self.words is None else self.words()
        return key if whose is None else f"{whose}, {key}"

    def say_end(self, lease: Lease) -> None:
        """Call `on_moved` if that is due."""
        if self.on_moved is not None and lease.reason is None and lease.give_up_at != self.said:
            self.said = lease.give_up_at
            self.on_moved()

    def next_at(self, *, under_way: bool) -> float:
        """When to act: to renew the lease, to give it up while a renewal is under way, to report that it is lost, or to
        ask its holder to stop.
        """
        lease = self.lease()
        if lease is None:
            return 0.0
        due_at = self.due_at
        if under_way and lease.reason is None:
            due_at = trust.lost_at(lease.trusted_until, lease.good_for, self.asked_at)
        return due_at if lease.superseded_by is None or lease.reason is not None else min(due_at, self.strikes_at)

    def is_to_stop(self, lease: Lease, now: float) -> bool:
        """Whether to ask its holder now to stop for a newer task."""
        return lease.superseded_by is not None and lease.reason is None and self.strikes_at <= now

    def schedule_next_stop(self, lease: Lease, now: float) -> None:
        """Note that the holder is asked to stop now, and again after a while."""
        again_at = now + min(trust.MAX_STRIKE_INTERVAL, lease.ttl * trust.STRIKE_SHARE)
        if lease.reason is None:
            self.strikes_at = again_at
        else:
            self.due_at = again_at

    def is_due(self, now: float) -> bool:
        """Whether to renew the lease now, because it is due or nearly due."""
        lease = self.lease()
        if lease is None or lease.reason is not None:
            return False
        return self.due_at <= now + lease.good_for * trust.RENEW_AFTER * trust.COALESCE

    def asks(self, now: float) -> None:
        """Note that a renewal begins. A further try, which may begin late, does not get more time than the first."""
        lease = self.lease()
        if lease is not None and lease.renewals != self.asked_after:
            self.asked_at, self.asked_after = now, lease.renewals

    def lose(self, lease: Lease, reason: str) -> None:
        """Note that the lease is lost, which is reported at once."""
        lease.lose(reason)
        self.due_at = 0.0

    def renewed(self, lease: Lease) -> None:
        """Note that a renewal was answered. If the lease was given up meanwhile, its holder is still asked to stop."""
        # From when it was sent: if the process was stopped in between, the answer says little by now.
        due_at = lease.trusted_until - lease.good_for * (1 - chance.spread(trust.RENEW_AFTER, least=0.9))
        self.due_at = min(due_at, clock.now() + self.every)
        if lease.reason is not None:  # Only now: the thread that watches may give it up at any moment.
            self.due_at = 0.0

    def try_again_or_give_up(self, lease: Lease, error: Exception) -> None:
        """Note that a renewal was not answered."""
        now = clock.now()
        lease.doubt(lease.ttl, now)  # It may be carried out when the lease has another ttl.
        give_up_at = lease.give_up_at
        if now >= give_up_at:
            self.lose(lease, f"it could not be renewed in time: {error}")
        else:
            pause = chance.spread(min(0.5, lease.good_for * trust.RETRY_SHARE))
            self.due_at = min(now + pause, give_up_at)


def weakly(call: Callable[[], T]) -> Callable[[], T | None]:
    """The same call; a bound method does not keep its object alive, and the call returns None once that is gone."""
    # Not `weakref.WeakMethod`, which takes half a kilobyte: there may be many.
    return partial(_call, weakref.ref(call.__self__), call.__func__) if isinstance(call, MethodType) else call


def _call(subject: weakref.ref[Any], method: Callable[[Any], T]) -> T | None:
    return None if (alive := subject()) is None else method(alive)
