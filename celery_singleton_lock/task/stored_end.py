"""The end of a task as its result backend has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery import states
from celery.utils.time import maybe_iso8601

from celery_singleton_lock import clock
from celery_singleton_lock.task.celery_types import TaskLike

#: Seconds by which the clocks of two workers may differ, where a stored result is taken for an older one.
CLOCKS_DIFFER = 60.0


def of(task: TaskLike, task_id: str, age: float) -> Mapping[str, Any] | None:
    """What the result backend has of the end of the task with this id; None if it has none.

    What was stored before the body ended, `age` seconds ago, is the end of another task with this id.

    Raises:
        Exception: as the backend has them.
    """
    if task.backend.get_state(task_id) not in states.READY_STATES:
        return None
    # What was there a moment ago may be forgotten by now.
    stored: Mapping[str, Any] = task.backend.get_task_meta(task_id)
    stored_at = _moment(stored.get("date_done"))
    is_of_this = stored_at is None or stored_at > clock.wall() - age - CLOCKS_DIFFER
    return stored if stored["status"] in states.READY_STATES and is_of_this else None


def _moment(date: Any) -> float | None:
    """Seconds since the epoch, of a date as a result backend gives it; None if it gives none, or one of no zone.

    Some are UTC then, some local: Django's, say, with `USE_TZ = False`.
    """
    try:
        found = maybe_iso8601(date)
        return None if found is None or found.tzinfo is None else float(found.timestamp())
    except Exception:  # noqa: BLE001 - every backend has its own
        return None
