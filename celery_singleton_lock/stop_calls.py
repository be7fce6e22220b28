"""Stops a run at once when a newer task has come: a thread of this process listens while there are such runs.

Nothing depends on it: a renewal says the same. Protocol: `docs/protocol.md`, section 14.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from celery.utils.log import get_logger

from celery_singleton_lock import chance, forks
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.later import Later
from celery_singleton_lock.stores.stops import Stop, Stops

logger = get_logger(__name__)

#: Seconds until the next try when the lock server has not answered: at first, and at most.
PAUSE, MAX_PAUSE = 0.05, 2.0

#: Calls that are kept for runs that have not said yet that they expect one: the latest.
EARLY = 100


class StopCalls:
    """Listens for the runs of one app in this process.

    Args:
        listen: what this process is told; None where nobody can be told.
        heartbeat: has the runs under its watch, and stops them.
    """

    def __init__(self, listen: Callable[[], Stops | None], heartbeat: Heartbeat) -> None:
        self._listen = listen
        self._heartbeat = heartbeat
        self._later = Later("singleton-lock-stops", self._hear)
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        self._mutex = threading.Lock()
        self._owners: set[str] = set()
        #: By owner, who is newer: a run is told to stop from when it has its lock, a moment before it is expected here.
        self._early: dict[str, str] = {}
        self._stops: Stops | None = None
        self._failures = 0

    def expect(self, owner: str) -> None:
        """Somebody runs under this owner from now on that may be told to stop."""
        with self._mutex:
            self._owners.add(owner)
            newer = self._early.pop(owner, None)
            if self._stops is None:  # Here, as the thread may begin when somebody has told it something.
                self._stops = self._listen()
        self._later.want()
        if newer is not None:
            self._heartbeat.supersede(owner, newer)

    def forget(self, owner: str) -> None:
        """It has ended. The thread notices when it has waited in vain: in a row of runs it is not started for each."""
        self._owners.discard(owner)

    def _hear(self) -> float | None:
        """Hear what comes next; None when there is nobody left to hear it for, or nobody can be told."""
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
            logger.debug("stops: nobody is told at once for now: %s", error)
            self._failures += 1
            return chance.back_off(self._failures, PAUSE, MAX_PAUSE)
        self._failures = 0
        # Whatever else is under the same watch is nobody's to stop.
        if stop is not None and self._is_expected(stop):
            self._heartbeat.supersede(stop.owner, stop.by)
        return 0.0

    def _is_expected(self, stop: Stop) -> bool:
        """Whether its run is; if not yet, it is kept for that."""
        with self._mutex:
            if stop.owner in self._owners:
                return True
            self._early[stop.owner] = stop.by
            if len(self._early) > EARLY:
                del self._early[next(iter(self._early))]
            return False
