"""Locks outside of tasks: the same lease as a `with` block, on clients of redis-py.

Begin with `lock.py`; `clients.py` is what the locks of one client share.
"""

from __future__ import annotations

from celery_singleton_lock.lock.lock import (
    Lock,
    NotAcquired,
    NotHeld,
    NoTimeout,
    NotOwned,
    Redlock,
    Semaphore,
    Unavailable,
)

__all__ = ["Lock", "NoTimeout", "NotAcquired", "NotHeld", "NotOwned", "Redlock", "Semaphore", "Unavailable"]
