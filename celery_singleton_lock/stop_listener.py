"""Stops a run at once when a newer task has come: a thread of this process listens while there are such runs.

Nothing depends on it: a renewal reports the same. Protocol: `docs/protocol.md`, section 14.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from celery.utils.log import get_logger

from celery_singleton_lock import chance, forks
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.later import Later
from celery_singleton_lock.stores.stops import StopOrder, StopReader

logger = get_logger(__name__)

#: Seconds until the next try if the lock server has not answered: at first, and at most.
PAUSE, MAX_PAUSE = 0.05, 2.0

#: How many orders are kept for runs that are not expected yet: the latest.
EARLY = 100


class StopListener:
    """Listens for the runs of one app in this process.

    Args:
        listen: opens the channel of this process's orders; returns None if the store has no such channel.
        heartbeat: watches the leases of the runs, and stops them.
    """

    def __init__(self, listen: Callable[[], StopReader | None], heartbeat: Heartbeat) -> None:
        self._listen = listen
        self._heartbeat = heartbeat
        self._later = Later("singleton-lock-stops", self._hear)
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        self._mutex = threading.Lock()
        self._owners: set[str] = set()
        #: The newer task by owner token: an order may come as soon as a run has its lock, a moment before it is
        #: expected here.
        self._early: dict[str, str] = {}
        self._stops: StopReader | None = None
        self._failures = 0

    def expect(self, owner: str) -> None:
        """Listen, from now on, for orders to stop the run under this owner token."""
        with self._mutex:
            self._owners.add(owner)
            newer = self._early.pop(owner, None)
            if self._stops is None:  # Not in the thread, which may start after an order has come.
                self._stops = self._listen()
        self._later.want()
        if newer is not None:
            self._heartbeat.supersede(owner, newer)

    def forget(self, owner: str) -> None:
        """The run has ended. The thread ends only after its next wait, so that it serves a whole series of runs."""
        self._owners.discard(owner)

    def _hear(self) -> float | None:
        """Wait for the next order; None if no run is left to listen for, or the store has no channel."""
        with self._mutex:
            stops, is_wanted = self._stops, bool(self._owners)
            if not is_wanted:
                self._stops = None
        if stops is None:
            return None
        if not is_wanted:
            stops.close()
            return None
        try:
            stop = stops.wait()
        except LockUnavailable as error:
            logger.debug("stops: no run can be stopped at once for now: %s", error)
            self._failures += 1
            return chance.back_off(self._failures, PAUSE, MAX_PAUSE)
        self._failures = 0
        # An order must not stop anything else under the same watch.
        if stop is not None and self._is_expected(stop):
            self._heartbeat.supersede(stop.owner, stop.by)
        return 0.0

    def _is_expected(self, stop: StopOrder) -> bool:
        """Whether the run of this order is expected; if not, keeps the order for later."""
        with self._mutex:
            if stop.owner in self._owners:
                return True
            self._early[stop.owner] = stop.by
            if len(self._early) > EARLY:
                del self._early[next(iter(self._early))]
            return False
