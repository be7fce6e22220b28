"""Extends the locks of sent messages to the time for which these may wait.

Before a message is sent, its lock is taken only for some seconds, so a program that dies in between leaves it for no
longer. Once the broker has the message, the lock is extended. Nobody waits for this: a separate thread does it for all
messages that were sent meanwhile.

Protocol: `docs/protocol.md`, section 12.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakMethod

from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks
from celery_singleton_lock.background import Later, do_at_exit
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.lease import Hold
from celery_singleton_lock.stores.store import Store

logger = get_logger(__name__)

#: Seconds for which the lock of a message lasts before it is confirmed: longer than sending takes.
UNCONFIRMED_TTL = 30.0

#: Seconds in which more messages may come, to be confirmed together; and seconds until the next try if there was no
#: answer.
AFTER, RETRY_AFTER = 0.02, 1.0

#: Seconds for which the thread stays, so that a series of messages does not start a thread for each.
LINGER = 5.0

#: The seconds that a server has for each step.
TIMEOUT = 2.0

#: The most holds in one round trip.
BATCH = 200


class Confirmations:
    """Renews holds of `store`, once each."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._later = Later("singleton-lock-sent", self.write, after=AFTER, linger=LINGER)
        self.start_anew()
        forks.start_anew_in_child(self)
        write: Callable[[], object] = self.write
        do_at_exit(WeakMethod(write))

    def start_anew(self) -> None:
        #: The holds to confirm, and until when that is useful. Without a mutex: a signal handler may interrupt the
        #: thread that adds, and add something itself.
        self._holds: deque[tuple[Hold, float]] = deque()
        #: Held during a write, so that a program that ends waits for it.
        self._writing = threading.Lock()

    def add(self, hold: Hold) -> None:
        """Make `hold` last for its ttl from about now, if it still exists then."""
        self._holds.append((hold, clock.now() + UNCONFIRMED_TTL))
        self._later.want()

    def write(self) -> float | None:
        """Confirm all holds; None, or the seconds until the next try for those that were not answered."""
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
        """The next holds to confirm, without those that must have ended by now."""
        now, batch = clock.now(), list[tuple[Hold, float]]()
        with suppress(IndexError):  # Raised when none are left.
            while len(batch) < BATCH:
                hold, until = self._holds.popleft()
                if until >= now:
                    batch.append((hold, until))
        return batch
