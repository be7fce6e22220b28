"""Calls that a server has not answered, repeated until it does: the ends of locks, of questions, and of messages.

One thread for each store, there only while a call is pending. Whoever made it has turned away long ago, so it may be
carried out late, and more than once. In the child of a fork nothing is pending: that is its parent's to say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks
from celery_singleton_lock.stores.redis.script import Call, batches

logger = get_logger(__name__)

#: Seconds between two tries: at first, and at most, so that all is said within a second after the server answers again.
PAUSE, MAX_PAUSE = 0.05, 0.5

#: Calls at most; the oldest give way. A lock that was not freed ends with its lease; a message whose end is
#: not noted may be carried out again, should another copy of it come.
MOST = 10_000

#: Calls in one round trip.
BATCH = 50


@dataclass(frozen=True, slots=True)
class _Pending:
    """A call that was not answered.

    Attributes:
        call: the call.
        since: when it was made.
        seconds: for how long it is worth saying.
    """

    call: Call
    since: float
    seconds: float


class PendingCalls:
    """Those of one store.

    Args:
        run_each: sends some calls, and gives the answers; an exception in the place of one that failed.
        server: its name, for messages.
    """

    def __init__(self, run_each: Callable[[Sequence[Call]], Sequence[Any]], server: str) -> None:
        self._run_each = run_each
        self._server = server
        self._mutex: threading.Lock
        self._calls: dict[Hashable, _Pending]
        self._thread: threading.Thread | None
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        """Have none: at first, and in the child of a fork."""
        self._mutex = threading.Lock()
        self._calls = {}
        self._thread = None

    def __bool__(self) -> bool:
        """Whether there are any: the server did not answer a moment ago."""
        return bool(self._calls)

    def add(self, name: Hashable, call: Call, *, seconds: float) -> None:
        """Repeat it until it is answered, for so many seconds; it takes the place of what was added under this name."""
        with self._mutex:
            self._calls.pop(name, None)
            if len(self._calls) >= MOST:
                self._calls.pop(next(iter(self._calls)))
                logger.warning(
                    "%s: more than %d ends of locks and messages were not answered; the oldest are given up",
                    self._server,
                    MOST,
                )
            self._calls[name] = _Pending(call, clock.now(), seconds)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="singleton-lock-pending", daemon=True)
                with suppress(RuntimeError):  # No thread is to be had: the next call tries again.
                    self._thread.start()

    def _run(self) -> None:
        pause = PAUSE
        while True:
            clock.sleep(pause)
            if not (due := self._due()):
                return
            pause = PAUSE if self._repeat(due) else min(2 * pause, MAX_PAUSE)

    def _due(self) -> list[tuple[Hashable, _Pending]]:
        """Those that are still worth saying; the thread ends where there are none."""
        with self._mutex:
            now = clock.now()
            for name in [name for name, it in self._calls.items() if now - it.since > it.seconds]:
                del self._calls[name]
                logger.warning(
                    "%s: no answer to the end of a lock or a message; given up (a lock has ended by itself since)",
                    self._server,
                )
            if not self._calls:
                self._thread = None
            return list(self._calls.items())

    def _repeat(self, due: Sequence[tuple[Hashable, _Pending]]) -> bool:
        """Say them again; whether all were answered."""
        for batch in batches(due, BATCH):
            reached = True
            try:
                answers = self._run_each([it.call.again() for _, it in batch])
            except Exception as error:  # noqa: BLE001 - whatever it was, the thread goes on
                answers, reached = [error] * len(batch), False
            failed = [answer for answer in answers if isinstance(answer, Exception)]
            with self._mutex:
                for (name, it), answer in zip(batch, answers, strict=True):
                    if not isinstance(answer, Exception) and self._calls.get(name) is it:
                        del self._calls[name]
            if failed:
                logger.debug("%s: %d ends of locks and messages are pending: %s", self._server, len(failed), failed[0])
            if not reached:
                return False  # Nor will be the rest. Of a cluster some masters may answer.
        return not self._calls
