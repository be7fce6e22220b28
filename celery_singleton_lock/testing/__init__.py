"""For tests: locks in memory that record what happens to them, a lock to run into, a real Redis, and the contract of a
lock store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_singleton_lock.testing.recorded import LockEvent, RecordedLocks, hold_lock, memory_locks
from celery_singleton_lock.testing.server import RedisServer

if TYPE_CHECKING:
    from celery_singleton_lock.testing.store_contract import StoreContract

__all__ = ["LockEvent", "RecordedLocks", "RedisServer", "StoreContract", "hold_lock", "memory_locks"]


def __getattr__(name: str) -> Any:
    if name != "StoreContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Imported only on demand: the rest does not need pytest.
    from celery_singleton_lock.testing.store_contract import StoreContract

    return StoreContract
