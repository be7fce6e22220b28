"""Locks outside of tasks: the same lease as a `with` block, on clients of redis-py.

Begin with `lock.py`; `holding.py` has what an object knows of its hold, and `clients.py` what the locks of one client
share.
"""

from __future__ import annotations

from celery_singleton_lock.lock.errors import NotAcquired, NotHeld, NoTimeout, NotOwned, Unavailable
from celery_singleton_lock.lock.lock import Lock
from celery_singleton_lock.lock.redlock import Redlock
from celery_singleton_lock.lock.semaphore import Semaphore

__all__ = ["Lock", "NoTimeout", "NotAcquired", "NotHeld", "NotOwned", "Redlock", "Semaphore", "Unavailable"]
