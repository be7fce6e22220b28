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
        """What is remembered of a message (see `Holder.message`); None for nothing.

        Raises:
            LockUnavailable: no answer, or an error.
        """

    def wake(self, key: str) -> None:
        """Wake one that waits for the lock, as if it was freed, whether it is or not. Never raises: a waiter that is
        not woken looks by itself.
        """

    def ledger(self, key: str) -> Ledger:
        """What beat has sent, under keys that begin with `key`."""

    def wake_ups(self) -> WakeUps | None:
        """What wakes a process for many locks, connected to nothing yet; None where nothing does."""

    def stops(self, prefix: str, process: str) -> Stops | None:
        """What a process of this name is told (see `Holder.process`), connected to nothing yet; None where nobody is.

        Args:
            prefix: of the keys of its locks.
            process: its name.
        """

    def tell(self, prefix: str, process: str, stop: Stop) -> None:
        """Tell it, if it listens. Never raises an error: a holder that does not hear of it learns it as it renews."""

    def journal(self, prefix: str, *, size: int) -> Journal:
        """The journal of all locks whose key begins with `prefix`; `size`: entries that are kept."""
