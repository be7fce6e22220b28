"""The errors of a lock outside of tasks: those of redis-py's lock, and of this package."""

from __future__ import annotations

from redis.exceptions import ConnectionError, LockError, LockNotOwnedError

from celery_singleton_lock.errors import LockConflict, LockLost, LockUnavailable, SingletonLockError


class _Plain(Exception):
    """Redis-py's `__repr__` needs what its own `__init__` has set."""

    __repr__ = Exception.__repr__


class NotHeld(_Plain, SingletonLockError, LockError):
    """The lock is not held by this thread, or has been released already."""


class NotOwned(_Plain, LockLost, LockNotOwnedError):
    """The lock was held, and is held no longer: it was not renewed in time, taken over, or deleted."""

    def __init__(self, key: str, reason: str = "") -> None:
        super().__init__(key, reason)
        self.lock_name = key


class NoTimeout(_Plain, SingletonLockError, LockError):
    """The lock was made without a `timeout`, and so has none to extend."""


class NotAcquired(_Plain, LockConflict, LockError):
    """Somebody else holds the lock, and held it for as long as this caller was willing to wait."""

    _nameless = "another holder"  # A program has no task's id, and redis-py's lock is welcome under the same key.

    def __init__(self, key: str, task_id: str | None = None, remaining: float | None = 0.0) -> None:
        super().__init__(key, task_id, remaining)
        self.lock_name = key


class Unavailable(_Plain, LockUnavailable, ConnectionError):
    """The lock server does not answer, or refuses to serve."""
