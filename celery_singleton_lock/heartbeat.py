"""The thread that renews every lease of this process.

One thread and one connection, whatever the number of leases; started with the first lease, again after a fork or a long
time without leases, and never ended by an error. The ttl is spent in thirds: after the first one a lease is renewed; in
the second one that is tried again and again while no answer comes; with the last one the lease counts as lost, and the
task is stopped in it, before anybody else can hold the lock. A lease is lost at once when the store says that it is no
longer ours.

A renewal that arrives after the release does no harm: it renews what is ours and never creates anything.
"""

from __future__ import annotations

import os
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from celery.utils.log import get_logger

from celery_singleton_lock import clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Store

logger = get_logger(__name__)

#: The share of the ttl after which a lease is renewed.
RENEW_AFTER = 1 / 3

#: The share of the ttl that is left when an unrenewed lease counts as lost.
GIVE_UP_BEFORE = 1 / 3

#: The share of the ttl that one step of a renewal may take: two steps (connect, read) that began at the last moment
#: still leave two thirds of the last third to stop the task in.
STEP_SHARE = 1 / 20

#: Seconds that one step may take at most.
MAX_STEP = 1.0

#: The share of the ttl, and the seconds at most, between two tries to stop a task that has lost its lock.
STRIKE_SHARE = 1 / 40
MAX_STRIKE_INTERVAL = 0.25

#: Seconds that the thread sleeps at most while there are leases: sleeping does not count the time in which the host is
#: suspended, and a lease does.
MAX_SLEEP = 1.0

#: Seconds without a lease after which the thread ends.
IDLE = 60.0

#: Why a lease was lost that the store no longer has.
GONE = "it is no longer ours in the store: it ended, was taken over, or was deleted"

#: What is due within this share of its renewal interval is renewed along with what is due now.
COALESCE = 0.1


@dataclass(slots=True)
class _Watched:
    """A lease under watch. Only the heartbeat's thread writes it after it was added.

    The references are weak, so that an execution which was torn down without saying goodbye (a time limit that struck
    in its last line) is not renewed for ever.
    """

    lease: weakref.ref[Lease]
    #: The method `on_lost` in two parts: `weakref.WeakMethod` takes half a kilobyte.
    subject: weakref.ref[Any]
    on_lost: Callable[[Any], None]
    due_at: float


class Heartbeat:
    """Renews leases in `store` until they are stopped or lost."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed: threading.Condition
        self._watched: dict[str, _Watched]
        self._thread: threading.Thread | None
        #: Whether the thread ends with the last lease. Written under `_changed`, read by the thread.
        self._closed = False
        #: When the thread looks next, unless it is notified.
        self._wakes_at: float
        self.begin()
        _heartbeats.add(self)

    def start(self, lease: Lease, on_lost: Callable[[], None]) -> None:
        """Renew `lease` from now on; call `on_lost` when it is lost, and again until it is stopped.

        Args:
            lease: kept as a weak reference only.
            on_lost: a method, kept weakly as well. It runs in the heartbeat's thread, so it must be quick.
        """
        due_at = lease.acquired_at + lease.ttl * RENEW_AFTER
        lease.ask = self._ask
        method: Any = on_lost
        watched = _Watched(weakref.ref(lease), weakref.ref(method.__self__), method.__func__, due_at)
        with self._changed:
            self._watched[lease.owner] = watched
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="singleton-lock-heartbeat", daemon=True)
                self._thread.start()
            elif due_at < self._wakes_at:
                self._changed.notify()

    def stop(self, lease: Lease) -> None:
        """Renew `lease` no more. A renewal that is under way may still arrive, and does no harm."""
        with self._changed:
            self._watched.pop(lease.owner, None)

    def close(self) -> None:
        """End the thread as soon as there is no lease to renew; another lease would start it again."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def begin(self) -> None:
        """Start with nothing: at first, and in the child of a fork, whose leases and thread are the parent's."""
        self._changed = threading.Condition(threading.Lock())
        self._watched = {}
        self._thread = None
        self._wakes_at = 0.0

    def _run(self) -> None:
        while True:
            try:
                due = self._wait_for_due()
                if due is None:
                    return
                self._renew([watched for watched in due if _is_held(watched)])
                self._strike(due)
            except Exception:
                # Whatever it was, the other leases of this process depend on this thread.
                logger.exception("heartbeat: unexpected error; going on")
                clock.sleep(MAX_STRIKE_INTERVAL)

    def _wait_for_due(self) -> list[_Watched] | None:
        """Sleep until something is due; None when there has been nothing to renew for long, and the thread may end."""
        idle = False
        with self._changed:
            while True:
                now = clock.now()
                for owner in [owner for owner, watched in self._watched.items() if watched.lease() is None]:
                    del self._watched[owner]
                due = [watched for watched in self._watched.values() if watched.due_at <= now + _slack(watched)]
                if any(watched.due_at <= now for watched in due):
                    return due
                if self._closed and not self._watched:
                    self._thread = None
                    return None
                # One more short sleep after the last lease is gone: in a row of short tasks nobody has to be woken.
                sleep = IDLE if idle and not self._watched else self._seconds_to_sleep(now)
                idle = not self._watched
                self._wakes_at = now + sleep
                woken = self._changed.wait(sleep)
                if sleep == IDLE and not woken and not self._watched:
                    self._thread = None
                    return None

    def _seconds_to_sleep(self, now: float) -> float:
        next_at = min((watched.due_at for watched in self._watched.values()), default=now + MAX_SLEEP)
        return min(max(next_at - now, 0.0), MAX_SLEEP)

    def _renew(self, due: list[_Watched]) -> None:
        """Renew what is due, and say when to look at each again."""
        pairs = [(watched, lease) for watched in due if (lease := watched.lease()) is not None]
        if not pairs:
            return
        leases = [lease for _, lease in pairs]
        try:
            renewed = self._store.renew(leases, timeout=step_of(leases))
        except LockUnavailable as error:
            logger.warning("heartbeat: %d leases not renewed, trying again: %s", len(leases), error)
            for watched, lease in pairs:
                _try_again_or_give_up(watched, lease, error)
            return
        for (watched, lease), ours in zip(pairs, renewed, strict=True):
            if ours:
                # From when it was sent: a process that was stopped in between reads an answer that says little by now.
                watched.due_at = lease.trusted_until - lease.ttl * (1 - RENEW_AFTER * random.uniform(0.9, 1.0))
            else:
                lease.lose(GONE)

    def _ask(self, lease: Lease) -> None:
        """In the thread that runs under an overdue lease: it goes on only if the lock is still ours."""
        try:
            (ours,) = self._store.renew([lease], timeout=step_of([lease]))
        except LockUnavailable as error:
            lease.lose(f"it is overdue, and could not be renewed: {error}")
        else:
            if not ours:
                lease.lose(GONE)

    def _strike(self, due: list[_Watched]) -> None:
        for watched in due:
            lease = watched.lease()
            if lease is None or lease.reason is None or lease.owner not in self._watched:
                continue
            watched.due_at = clock.now() + min(MAX_STRIKE_INTERVAL, lease.ttl * STRIKE_SHARE)
            try:
                if (subject := watched.subject()) is not None:
                    watched.on_lost(subject)
            except Exception:
                logger.exception("heartbeat: %s: could not be told that it is lost", lease.key)


def step_of(leases: Sequence[Lease]) -> float:
    """Seconds that one step of a renewal of these leases may take."""
    return min(MAX_STEP, min(lease.ttl for lease in leases) * STEP_SHARE)


def _is_held(watched: _Watched) -> bool:
    lease = watched.lease()
    return lease is not None and lease.reason is None


def _slack(watched: _Watched) -> float:
    lease = watched.lease()
    return 0.0 if lease is None or lease.reason is not None else lease.ttl * RENEW_AFTER * COALESCE


def _try_again_or_give_up(watched: _Watched, lease: Lease, error: LockUnavailable) -> None:
    now = clock.now()
    give_up_at = lease.trusted_until - lease.ttl * GIVE_UP_BEFORE
    if now >= give_up_at:
        lease.lose(f"it could not be renewed in time: {error}")
    else:
        pause = min(0.5, lease.ttl / 20) * random.uniform(0.5, 1.0)
        watched.due_at = min(now + pause, give_up_at)


#: All of this process, for the child of a fork to begin anew with.
_heartbeats: weakref.WeakSet[Heartbeat] = weakref.WeakSet()


def _begin_anew() -> None:
    for heartbeat in _heartbeats:
        heartbeat.begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
