"""How a waiter gets its turn: woken by its bell, it asks for the lock again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from celery_singleton_lock import chance, clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.lease import Done, Held, Holder, Lease
from celery_singleton_lock.stores.base import Bell, Store

Ask = Callable[[], Lease | Held | Done]


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


class AskingTurn:
    """A `Turn` that asks when its bell has rung.

    Args:
        bell: wakes it.
        ask: acquires the lock.
        leave: sees to it that nothing is left of the questions, when it was interrupted; frees the lock, if told to.
    """

    def __init__(self, bell: Bell, ask: Ask, leave: Callable[[bool], None] = lambda free: None) -> None:
        self._bell = bell
        self._ask = ask
        self._leave = leave
        self._found: Lease | Held | Done | None = None
        self._breaks = Breaks()

    @classmethod
    def of(
        cls,
        store: Store,
        key: str,
        owner: str,
        *,
        ttl: float,
        holder: Holder,
        once: bool,
        limit: int,
        given_up: Sequence[str] = (),
    ) -> AskingTurn:
        """One that asks this store; see `Store.turn`."""

        def ask() -> Lease | Held | Done:
            return store.acquire(
                *(key, owner), ttl=ttl, holder=holder, waiting=True, once=once, limit=limit, given_up=given_up
            )

        return cls(store.bell(key), ask)

    def __enter__(self) -> AskingTurn:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None or self._breaks.seen:
            self._leave(error is not None or not isinstance(self._found, Lease))
        self._bell.__exit__(kind, error, tb)

    def wait(self, timeout: float) -> Lease | Held | Done:
        """See `Turn.wait`."""
        with self._breaks.survived(timeout):
            self._bell.wait(timeout)
        return self.ask()

    def ask(self) -> Lease | Held | Done:
        """See `Turn.ask`."""
        self._found = None
        self._found = self._ask()
        return self._found
