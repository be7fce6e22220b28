"""Adds an execution's lock as attributes to the current span, which an instrumentation of Celery has begun.

A worker imports this if `opentelemetry` is installed; you need not switch anything on.
"""

from __future__ import annotations

from typing import Any

from opentelemetry.trace import get_current_span

from celery_singleton_lock import signals
from celery_singleton_lock.errors import LockConflict
from celery_singleton_lock.lease import Lease

#: The beginning of the attributes' names.
PREFIX = "celery.singleton_lock"


@signals.lock_acquired.connect
def _acquired(key: str, lease: Lease, waited: float, **_: Any) -> None:
    _tell(key=key, fence=lease.fence, waited=waited)


@signals.lock_conflict.connect
def _conflict(key: str, conflict: LockConflict, policy: str, **_: Any) -> None:
    _tell(key=key, policy=policy, holder=conflict.task_id or "")


@signals.lock_released.connect
def _released(held: float, **_: Any) -> None:
    _tell(held=held)


def _tell(**attributes: str | float) -> None:
    span = get_current_span()
    if span.is_recording():
        span.set_attributes({f"{PREFIX}.{name}": value for name, value in attributes.items()})
