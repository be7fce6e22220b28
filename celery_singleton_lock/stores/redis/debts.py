"""What a server is still to be told: ends of locks and of messages that it did not answer, said again until it does.

One thread for each store, there only while something is owed. Whoever owes it has turned away long ago, so all of it
may be carried out late, and more than once. The child of a fork owes nothing: that is its parent's to say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks
from celery_singleton_lock.stores.redis.script import Call

logger = get_logger(__name__)

#: Seconds between two tries: at first, and at most, so that all is said within a second after the server answers again.
PAUSE, MAX_PAUSE = 0.05, 0.5

#: How much is owed at most; the oldest give way. A lock that was not freed ends with its lease; a message whose end is
#: not noted may be carried out again, should another copy of it come.
MOST = 10_000

#: Calls in one round trip.
BATCH = 50


@dataclass(frozen=True, slots=True)
class _Debt:
    """A call that was not answered.

    Attributes:
        make: the call, by the seconds that have gone by.
        since: when it was owed.
        seconds: for how long it is worth saying.
    """

    make: Callable[[float], Call]
    since: float
    seconds: float


class Debts:
    """What one store owes.

    Args:
        run_each: sends some calls, and gives the answers; an exception in the place of one that failed.
        shown: the server, for messages.
    """

    def __init__(self, run_each: Callable[[Sequence[Call]], Sequence[Any]], shown: str) -> None:
        self._run_each = run_each
        self._shown = shown
        self._mutex: threading.Lock
        self._debts: dict[Hashable, _Debt]
        self._thread: threading.Thread | None
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        """Owe nothing: at first, and in the child of a fork."""
        self._mutex = threading.Lock()
        self._debts = {}
        self._thread = None

    @property
    def is_behind(self) -> bool:
        """Whether something is owed: the server did not answer a moment ago."""
        return bool(self._debts)

    def owe(self, name: Hashable, make: Callable[[float], Call], *, seconds: float) -> None:
        """Say it until it is answered, for so many seconds; it takes the place of what was owed under this name."""
        with self._mutex:
            self._debts.pop(name, None)
            if len(self._debts) >= MOST:
                self._debts.pop(next(iter(self._debts)))
                logger.warning(
                    "%s: more than %d ends of locks and messages were not answered; the oldest are given up", self, MOST
                )
            self._debts[name] = _Debt(make, clock.now(), seconds)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="singleton-lock-debts", daemon=True)
                with suppress(RuntimeError):  # No thread is to be had: the next debt tries again.
                    self._thread.start()

    def __str__(self) -> str:
        return self._shown

    def _run(self) -> None:
        pause = PAUSE
        while True:
            clock.sleep(pause)
            if not (due := self._due()):
                return
            pause = PAUSE if self._pay(due) else min(2 * pause, MAX_PAUSE)

    def _due(self) -> list[tuple[Hashable, _Debt]]:
        """What is owed and still worth saying; the thread ends where that is nothing."""
        with self._mutex:
            now = clock.now()
            for name in [name for name, debt in self._debts.items() if now - debt.since > debt.seconds]:
                del self._debts[name]
                logger.warning(
                    "%s: no answer to the end of a lock or a message; given up (a lock has ended by itself since)", self
                )
            if not self._debts:
                self._thread = None
            return list(self._debts.items())

    def _pay(self, due: Sequence[tuple[Hashable, _Debt]]) -> bool:
        """Say it; whether all of it was answered."""
        for start in range(0, len(due), BATCH):
            batch = due[start : start + BATCH]
            reached = True
            try:
                answers = self._run_each([debt.make(clock.now() - debt.since) for _, debt in batch])
            except Exception as error:  # noqa: BLE001 - whatever it was, the thread goes on
                answers, reached = [error] * len(batch), False
            failed = [answer for answer in answers if isinstance(answer, Exception)]
            with self._mutex:
                for (name, debt), answer in zip(batch, answers, strict=True):
                    if not isinstance(answer, Exception) and self._debts.get(name) is debt:
                        del self._debts[name]
            if failed:
                logger.debug("%s: %d ends of locks and messages are still to be said: %s", self, len(failed), failed[0])
            if not reached:
                return False  # Nor will be the rest. Of a cluster some masters may answer.
        return not self.is_behind
