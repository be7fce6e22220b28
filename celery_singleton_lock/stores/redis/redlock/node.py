"""One node of a Redlock, as the threads of a process share it: whether it can be reached, and what is pending."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from redis.exceptions import NoPermissionError

from celery_singleton_lock import clock
from celery_singleton_lock.stores.redis.script import Call
from celery_singleton_lock.stores.redis.server import Server, words_of

#: Seconds for which a node that could not be connected to is left alone: at first, and at most.
PAUSE, MAX_PAUSE = 0.5, 4.0

#: The most calls that are kept for a node; the oldest are dropped.
MOST_PENDING = 1000


class Node:
    """One server of a Redlock.

    A call that it has not answered, and must carry out all the same (the end of a hold, or of an attempt), is pending
    until it has.

    No mutex: a fork may come at any time, and in the child nobody would unlock it. What threads do here at the same
    time does no harm.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self._pause = PAUSE
        self._avoided_until = 0.0
        #: Calls, and until when they are worth sending.
        self._pending: deque[tuple[float, Call]] = deque(maxlen=MOST_PENDING)
        #: Why there is no connection; a text, since an exception would keep alive all that its traceback refers to.
        self.reason = "not connected yet"

    @property
    def is_avoided(self) -> bool:
        return clock.now() < self._avoided_until

    @property
    def has_failed(self) -> bool:
        """Whether it failed when it was last connected to."""
        return self._pause > PAUSE

    @property
    def owes(self) -> bool:
        """Whether there are calls that were to be repeated, in time or not."""
        return len(self._pending) > 0

    @property
    def has_pending(self) -> bool:
        while self._pending:
            with suppress(IndexError):
                if self._pending[0][0] > clock.now():
                    return True
                self._pending.popleft()
        return False

    def failed(self, error: Exception) -> None:
        """Leave it alone for a while, twice as long each time."""
        self.reason = words_of(error)
        self._avoided_until = clock.now() + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)

    def connected(self) -> None:
        self._pause, self._avoided_until = PAUSE, 0.0

    def note(self, call: Call, until: float, answer: object) -> None:
        """Have a call repeated if it was not carried out, as far as is known: out of memory, a replica, no answer."""
        if isinstance(answer, Exception) and not isinstance(answer, NoPermissionError):
            self._pending.append((until, call))

    def settle(self, connect: float, answer: float) -> bool:
        """Send it what is pending, if it can be reached; whether something is left.

        Args:
            connect: seconds that each step of connecting may take.
            answer: seconds for the answers; a node that needs longer is left alone for a while.
        """
        if not self.is_avoided and (pending := [*self.take_pending()]):
            answers: list[Any]
            try:
                with self.server.connection(connect) as connection:
                    connection.wait_at_most(answer)
                    answers = connection.run_each([call for _, call in pending])
            except Exception as error:  # noqa: BLE001 - whatever it was, it is tried again
                self.failed(error)
                answers = [error] * len(pending)
            else:
                self.connected()
            for (until, call), answered in zip(pending, answers, strict=True):
                self.note(call, until, answered)
            if not self._pending:
                self.server.close()  # What is not in use: this is seldom needed.
        return self.has_pending

    def take_pending(self) -> Iterator[tuple[float, Call]]:
        """The calls to send now, and until when to repeat them: the taker sends them one by one."""
        for _ in range(len(self._pending)):
            with suppress(IndexError):
                until, call = self._pending.popleft()
                if until > clock.now():
                    yield until, call.again()
