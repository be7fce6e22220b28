"""Celery tasks that never run twice at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery_singleton_lock.errors import (
    Aborted,
    DuplicateTask,
    InvalidKey,
    InvalidOption,
    LockConflict,
    LockLost,
    LockSuperseded,
    LockUnavailable,
    ResultLost,
    SingletonLockError,
    StaleFence,
    WrongLockServer,
)
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.options.rules import CallOptions
from celery_singleton_lock.signals import (
    lock_acquired,
    lock_blocked,
    lock_conflict,
    lock_duplicate,
    lock_lost,
    lock_released,
    lock_superseded,
)
from celery_singleton_lock.task.sending import DuplicateResult
from celery_singleton_lock.task.singleton_task import SingletonTask
from celery_singleton_lock.worker.bootstep import install
from celery_singleton_lock.worker.request import SingletonRequest

if TYPE_CHECKING:
    from celery_singleton_lock.lock import Lock, Redlock, Semaphore

__all__ = [
    "Aborted",
    "CallOptions",
    "DuplicateResult",
    "DuplicateTask",
    "InvalidKey",
    "InvalidOption",
    "Lease",
    "Lock",
    "LockConflict",
    "LockLost",
    "LockSuperseded",
    "LockUnavailable",
    "Redlock",
    "ResultLost",
    "Semaphore",
    "SingletonLockError",
    "SingletonRequest",
    "SingletonTask",
    "StaleFence",
    "WrongLockServer",
    "install",
    "lock_acquired",
    "lock_blocked",
    "lock_conflict",
    "lock_duplicate",
    "lock_lost",
    "lock_released",
    "lock_superseded",
]


def __getattr__(name: str) -> Any:
    """Locks outside of tasks, loaded when they are first used: tasks do not need them."""
    if name in ("Lock", "Redlock", "Semaphore"):
        from celery_singleton_lock import lock

        return getattr(lock, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
