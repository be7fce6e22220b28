"""A hold is something under a key that can be freed; a lease is a hold that is trusted until a certain moment.

The holder trusts its lease from the moment before the command that took or renewed it was *sent*, not from the answer.
The server counts from some moment in between, so the holder always stops trusting first (`trust.end_of`).

Protocol: `docs/protocol.md`, section 3.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from celery_singleton_lock import clock, trust
from celery_singleton_lock.errors import LockLost
from celery_singleton_lock.holder import new_owner


class Hold:
    """Something under a key that can be freed, whether or not anybody trusts it.

    Attributes:
        key: the key of the lock.
        owner: the owner token, which no other hold has.
        ttl: seconds that the hold lasts without a renewal.
        limit: how many may hold the key at once.
        ending: whether a request to free it got no answer.
        superseded_by: the id of the newer task for which its holder must stop; None if there is none. The hold lasts
            until the holder has stopped.
        only_longer: whether a renewal leaves a hold that lasts longer as it is.
    """

    __slots__ = ("__weakref__", "ending", "key", "limit", "only_longer", "owner", "superseded_by", "ttl")

    def __init__(
        self,
        key: str,
        owner: str,
        *,
        ttl: float,
        limit: int = 1,
        only_longer: bool = False,
    ) -> None:
        self.key = key
        self.owner = owner
        self.ttl = ttl
        self.limit = limit
        self.only_longer = only_longer
        self.ending = False
        self.superseded_by: str | None = None

    @classmethod
    def of_nobody(cls, key: str) -> Hold:
        """A hold that nobody has, for other requests about a key; its ttl is how long these may take, see `Redlock`."""
        return Hold(key, new_owner(), ttl=30.0)

    def supersede(self, by: str | None) -> None:
        """Note the newer task for which the holder must stop; the first such task counts. None changes nothing."""
        self.superseded_by = by if self.superseded_by is None else self.superseded_by

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.key} owner={self.owner[:8]}>"


class Lease(Hold):
    """One execution's hold of a lock, trusted until a moment.

    Attributes:
        fence: a number that is higher for every later holder of the same key. Let the system to which you write refuse
            a lower number than it has seen, and a stale holder cannot do harm. 0 if no lock is held.
        reason: why the lease was lost; None if it is not lost.
        is_told: whether its holder was told that it is lost.
    """

    # Written by the thread that renews the lease (`extend`, `lose`), read by the thread that runs under it; each
    # attribute is replaced as a whole, so neither needs a mutex. For the renewal:
    # - trusted_until: on `clock.now()`; after it somebody else may hold the lock.
    # - ask: asks the store whether a lease is still held, and extends or loses it; set by the heartbeat.
    __slots__ = ("acquired_at", "ask", "fence", "is_told", "pid", "reason", "renewals", "trusted_until")

    def __init__(self, key: str, owner: str, *, ttl: float, fence: int, sent_at: float, limit: int = 1) -> None:
        # As in `Hold`, without calling it: each task makes a lease, and a call takes longer than these lines.
        self.key, self.owner, self.ttl, self.limit, self.ending = key, owner, ttl, limit, False
        self.only_longer = False
        self.fence = fence
        self.pid = os.getpid()
        self.superseded_by: str | None = None
        self.reason: str | None = None
        self.is_told = False
        self.ask: Callable[[Lease], None] | None = None
        self.acquired_at, self.renewals = sent_at, 0
        self.trusted_until = trust.end_of(sent_at, ttl)

    def __repr__(self) -> str:
        return f"<Lease {self.key} fence={self.fence} remaining={self.remaining:.1f}>"

    @property
    def held(self) -> bool:
        """Whether the lock can still be trusted to be held."""
        return self.reason is None and self.trusted_until > clock.now()

    @property
    def remaining(self) -> float:
        """Seconds for which the lease is still trusted; renewals push the end out."""
        return self.trusted_until - clock.now()

    @property
    def give_up_at(self) -> float:
        """When its task is stopped unless the lease is renewed: early enough for it to end while the lock is held."""
        return self.trusted_until - self.ttl * trust.GIVE_UP_BEFORE

    def check(self) -> None:
        """Raise an error if the lock is lost; takes no round trip while the lease is trusted.

        A process that slept past the end of its lease asks the store: if its hold is still there, nobody else had the
        lock in between. Nothing stops a process that is paused right after this call; if that matters, use `fence`.

        Raises:
            LockLost: the lease ended or was taken.
        """
        if self.reason is None and self.trusted_until > clock.now():
            return
        if self.reason is None and self.ask is not None:
            self.ask(self)
        if not self.held:
            raise LockLost(self.key, self.reason or "the lease ended")

    def extend(self, sent_at: float, ttl: float) -> None:
        """Trust the lease again from `sent_at`, when the command that renewed it with this ttl was sent."""
        self.renewals += 1
        self.trusted_until = max(self.trusted_until, trust.end_of(sent_at, ttl))

    def lose(self, reason: str) -> None:
        self.reason = reason


def unheld() -> Lease:
    """A replacement for a lease if no lock is held: fence 0, never `held`."""
    lease = Lease("", "", ttl=0.0, fence=0, sent_at=0.0)
    lease.lose("this execution holds no lock")
    return lease
