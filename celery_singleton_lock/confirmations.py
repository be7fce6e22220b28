"""Extends the locks of sent messages to the time for which these may wait.

A lock is taken for some seconds before its message is sent: a program that dies in between leaves no more than that.
Once the broker has the message, nobody waits for this: a thread of its own says it, of all that were sent meanwhile.

Protocol: `docs/protocol.md`, section 12.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakMethod

from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.later import Later
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.stores.base import LockStore

logger = get_logger(__name__)

#: Seconds that the lock of a message is good for before it is confirmed: longer than sending takes.
PROVISIONAL = 30.0

#: Seconds in which more comes to be said together; and until the next try where there was no answer.
AFTER, RETRY_AFTER = 0.02, 1.0

#: Seconds for which the thread stays: sending one message after the other starts no thread for each.
LINGER = 5.0

#: Seconds that a server gets for each step.
TIMEOUT = 2.0

#: Holds in one round trip.
BATCH = 200


class Confirmations:
    """Renews holds of `store`, once each."""

    def __init__(self, store: LockStore) -> None:
        self._store = store
        self._later = Later("singleton-lock-sent", self.write, after=AFTER, linger=LINGER)
        self.start_anew()
        forks.start_anew_in_child(self)
        write: Callable[[], object] = self.write
        _write_at_exit(WeakMethod(write))

    def start_anew(self) -> None:
        #: What is to be said, and until when that is of use. No mutex: a signal's handler may
        #: interrupt the thread that adds, and add something itself.
        self._holds: deque[tuple[Hold, float]] = deque()
        #: A program that ends waits for what a thread says at that moment.
        self._writing = threading.Lock()

    def add(self, hold: Hold) -> None:
        """Have `hold` last for its ttl from about now, if it is still there then."""
        self._holds.append((hold, clock.now() + PROVISIONAL))
        self._later.want()

    def write(self) -> float | None:
        """Say what there is to say; what was not answered is kept for that many seconds."""
        with self._writing:
            return self._write()

    def _write(self) -> float | None:
        while batch := self._next():
            try:
                self._store.renew([hold for hold, _ in batch], timeout=TIMEOUT)
            except LockUnavailable as error:
                logger.debug("messages that were sent are not confirmed yet, trying again: %s", error)
                self._holds.extendleft(reversed(batch))
                return RETRY_AFTER
            except BaseException:
                self._holds.extendleft(reversed(batch))
                raise
        return None

    def _next(self) -> list[tuple[Hold, float]]:
        """Those that come next, without what is over by now unless another one has said it."""
        now, batch = clock.now(), list[tuple[Hold, float]]()
        with suppress(IndexError):  # There are no more.
            while len(batch) < BATCH:
                hold, until = self._holds.popleft()
                if until >= now:
                    batch.append((hold, until))
        return batch


def _write_at_exit(write: WeakMethod[Callable[[], object]]) -> None:
    """A program that ends as soon as it has sent something says so before."""

    def at_exit() -> None:
        if (found := write()) is not None:
            found()

    atexit.register(at_exit)
