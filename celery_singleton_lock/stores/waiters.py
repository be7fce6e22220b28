"""How a waiter gets the lock: it asks for it again when it is woken.

Protocol: `docs/protocol.md`, section 7.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from celery_singleton_lock import chance, clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, Record

#: Acquires the lock, for the same owner each time.
Ask = Callable[[], Lease | Held | Record]

#: Seconds to wait after a break in the connection: at first, and at most if breaks follow one another.
PAUSE, MAX_PAUSE = 0.01, 1.0


class WakeUp(Protocol):
    """Wakes one waiter each time that the lock is freed, the one that has waited longest first."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None, /
    ) -> None: ...

    def wait(self, timeout: float) -> object:
        """Return when the lock may be free: woken, or after `timeout` seconds, or now and then; true if it was woken.

        The place in the queue is kept until this waiter was woken.

        Raises:
            LockUnavailable: no answer, or an error.
        """

    def pass_on(self) -> None:
        """Wake another waiter in its place: it has not taken the lock that it was woken for."""


class AskingWaiter:
    """A `Waiter` that asks when it was woken.

    Args:
        wake_up: wakes it.
        ask: acquires the lock.
        leave: clears what is left of the questions, and of its place in the queue; with True, frees the lock.
    """

    def __init__(self, wake_up: WakeUp, ask: Ask, leave: Callable[[bool], None] = lambda free: None) -> None:
        self._wake_up = wake_up
        self._ask = ask
        self._leave = leave
        self._found: Lease | Held | Record | None = None
        #: Whether it was woken, and has not looked since; or has found that it does not want the lock any more.
        self._rang = False
        #: Whether its connection has broken, and how long it waits after the next break.
        self._was_cut = False
        self._pause = PAUSE

    def __enter__(self) -> AskingWaiter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None or self._may_be_given_more() or isinstance(self._found, (Held, Record)):
            # If it was interrupted between reading and returning, the lock may be held, and nobody knows.
            self._leave(error is not None or not isinstance(self._found, Lease))
        if self._rang:
            self._wake_up.pass_on()
        self._wake_up.__exit__(kind, error, tb)

    def wait(self, timeout: float) -> Lease | Held | Record:
        self._found = None
        try:
            self._found = self._woken(timeout)
            self._pause = PAUSE
        except LockUnavailable:
            # This says little about the server: a waiter that cannot reach it finds that out by asking.
            self._was_cut = True
            clock.sleep(min(timeout, chance.spread(self._pause)))
            self._pause = min(3 * self._pause, MAX_PAUSE)
        return self._look() if self._found is None else self._found

    def ask(self) -> Lease | Held | Record:
        return self._asked(self._ask)

    def _asked(self, ask: Ask) -> Lease | Held | Record:
        self._found = None
        self._found = ask()
        if not isinstance(self._found, Record):
            self._rang = False  # It has the lock, or its holder wakes the next one.
        return self._found

    def _look(self) -> Lease | Held | Record:
        """What an acquire finds, if the wake-up brought no answer."""
        return self.ask()

    def _woken(self, timeout: float) -> Lease | Held | Record | None:
        """The answer that came with the wake-up; None if there is none."""
        self._rang |= bool(self._wake_up.wait(timeout))
        return None

    def _may_be_given_more(self) -> bool:
        """Whether the server may still carry out something for it."""
        return self._was_cut
