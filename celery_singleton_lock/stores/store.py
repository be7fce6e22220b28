"""A store with everything that this package needs."""

from __future__ import annotations

from typing import Protocol

from celery_singleton_lock.stores.base import LockStore, Record
from celery_singleton_lock.stores.inspector import Inspector
from celery_singleton_lock.stores.journal import Journal
from celery_singleton_lock.stores.ledger import Ledger
from celery_singleton_lock.stores.stops import Stop, Stops
from celery_singleton_lock.stores.wake_ups import WakeUps


class Store(LockStore, Inspector, Protocol):
    """Keeps locks, shows them, and keeps what beat and the journal write."""

    def recorded(self, key: str, message: str) -> Record | None:
        """What is remembered of a message (see `Holder.message`); None if there is nothing.

        Raises:
            LockUnavailable: no answer, or an error.
        """

    def wake(self, key: str) -> None:
        """Wake a waiter as if the lock were freed, whether it is or not. Never raises: a waiter that is not woken looks
        by itself.
        """

    def ledger(self, key: str) -> Ledger:
        """What beat has sent, under keys that begin with `key`."""

    def wake_ups(self) -> WakeUps | None:
        """What wakes a process for many locks, not connected yet; None if nothing does."""

    def stops(self, prefix: str, process: str) -> Stops | None:
        """The stops that a process is notified of, not connected yet; None if the store notifies nobody.

        Args:
            prefix: the prefix of its locks' keys.
            process: its name (see `Holder.process`).
        """

    def tell(self, prefix: str, process: str, stop: Stop) -> None:
        """Notify the process, if it listens. Never raises an error: otherwise the holder learns it when it renews."""

    def journal(self, prefix: str, *, size: int) -> Journal:
        """The journal of all locks whose key begins with `prefix`; `size`: entries that are kept."""
