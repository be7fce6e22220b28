"""How a waiter gets its turn: woken by its bell, it asks for the lock again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType

from celery_singleton_lock import chance, clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Bell, Held, LockRequest, LockStore, Record

Ask = Callable[[], Lease | Held | Record]


#: Seconds to wait after a break: at first, and at most when one follows the other.
PAUSE, MAX_PAUSE = 0.01, 1.0


class Breaks:
    """The breaks in a waiter's connection, which say little about the server: who does not reach it hears so by asking.

    Attributes:
        seen: whether there was one.
    """

    def __init__(self) -> None:
        self.seen = False
        self._pause = PAUSE

    @contextmanager
    def survived(self, timeout: float) -> Iterator[None]:
        """Wait a little after a break, and longer after the next, but not for more than `timeout` seconds."""
        try:
            yield
            self._pause = PAUSE
        except LockUnavailable:
            self.seen = True
            clock.sleep(min(timeout, chance.spread(self._pause)))
            self._pause = min(3 * self._pause, MAX_PAUSE)


class AskingWaiter:
    """A `Waiter` that asks when its bell has rung.

    Args:
        bell: wakes it.
        ask: acquires the lock.
        leave: sees to it that nothing is left of the questions, when it was interrupted; frees the lock, if told to.
    """

    def __init__(self, bell: Bell, ask: Ask, leave: Callable[[bool], None] = lambda free: None) -> None:
        self._bell = bell
        self._ask = ask
        self._leave = leave
        self._found: Lease | Held | Record | None = None
        self._breaks = Breaks()

    @classmethod
    def of(cls, store: LockStore, request: LockRequest) -> AskingWaiter:
        """One that asks this store; see `LockStore.waiter`."""
        waiting = replace(request, waiting=True)
        return cls(store.bell(request.key), lambda: store.acquire(waiting))

    def __enter__(self) -> AskingWaiter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None or self._breaks.seen:
            self._leave(error is not None or not isinstance(self._found, Lease))
        self._bell.__exit__(kind, error, tb)

    def wait(self, timeout: float) -> Lease | Held | Record:
        """See `Waiter.wait`."""
        with self._breaks.survived(timeout):
            self._bell.wait(timeout)
        return self.ask()

    def ask(self) -> Lease | Held | Record:
        """See `Waiter.ask`."""
        self._found = None
        self._found = self._ask()
        return self._found
