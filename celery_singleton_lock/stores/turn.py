"""How a waiter gets its turn: woken by its bell, it asks for the lock again."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from celery_singleton_lock.lease import Done, Held, Holder, Lease
from celery_singleton_lock.stores.base import Bell, Store

Ask = Callable[[], Lease | Held | Done]


class AskingTurn:
    """A `Turn` that asks when its bell has rung.

    Args:
        bell: wakes it.
        ask: acquires the lock.
    """

    def __init__(self, bell: Bell, ask: Ask) -> None:
        self._bell = bell
        self._ask = ask

    @classmethod
    def of(
        cls, store: Store, key: str, owner: str, *, ttl: float, holder: Holder, once: bool, limit: int
    ) -> AskingTurn:
        """One that asks this store; see `Store.turn`."""

        def ask() -> Lease | Held | Done:
            return store.acquire(key, owner, ttl=ttl, holder=holder, waiting=True, once=once, limit=limit)

        return cls(store.bell(key), ask)

    def __enter__(self) -> AskingTurn:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bell.__exit__(kind, error, tb)

    def wait(self, timeout: float) -> Lease | Held | Done:
        """See `Turn.wait`."""
        self._bell.wait(timeout)
        return self._ask()
