"""Celery tasks that never run twice at the same time."""

from __future__ import annotations

from celery_singleton_lock.errors import (
    Aborted,
    InvalidKey,
    InvalidOption,
    LockConflict,
    LockLost,
    LockUnavailable,
    ResultLost,
    SingletonLockError,
)
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.signals import lock_acquired, lock_conflict, lock_lost, lock_released
from celery_singleton_lock.task import SingletonTask
from celery_singleton_lock.worker import install

__all__ = [
    "Aborted",
    "InvalidKey",
    "InvalidOption",
    "Lease",
    "LockConflict",
    "LockLost",
    "LockUnavailable",
    "ResultLost",
    "SingletonLockError",
    "SingletonTask",
    "install",
    "lock_acquired",
    "lock_conflict",
    "lock_lost",
    "lock_released",
]
