"""For tests: locks in memory that record what happens to them, a lock to run into, and a real Redis."""

from __future__ import annotations

from celery_singleton_lock.testing.recorded import LockEvent, RecordedLocks, hold_lock, memory_locks
from celery_singleton_lock.testing.server import RedisServer

__all__ = ["LockEvent", "RecordedLocks", "RedisServer", "hold_lock", "memory_locks"]
