"""A store with everything that the package asks of one."""

from __future__ import annotations

from typing import Protocol

from celery_singleton_lock.stores.base import LockStore
from celery_singleton_lock.stores.inspector import Inspector
from celery_singleton_lock.stores.journal import Journal
from celery_singleton_lock.stores.ledger import Ledger
from celery_singleton_lock.stores.wake_ups import WakeUps


class Store(LockStore, Inspector, Protocol):
    """Keeps locks, shows them, and keeps what beat and the journal write."""

    def ledger(self, key: str) -> Ledger:
        """What beat has sent, under keys that begin with `key`."""

    def wake_ups(self) -> WakeUps | None:
        """What wakes a process for many locks, connected to nothing yet; None where nothing does."""

    def journal(self, prefix: str, *, size: int) -> Journal:
        """The journal of all locks whose key begins with `prefix`; `size`: entries that are kept."""
