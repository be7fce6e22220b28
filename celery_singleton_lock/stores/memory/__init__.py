"""Locks in the memory of this process: for tests and for `memory://` brokers. They exclude threads, not processes.

Begin with `store.py`; what beat and the journal write is in the other modules.
"""

from __future__ import annotations

from celery_singleton_lock.stores.memory.store import MemoryStore

__all__ = ["MemoryStore"]
