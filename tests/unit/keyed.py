"""The keys of calls, as an exclusive task makes them of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Celery
from celery.app.task import Context

from celery_singleton_lock import SingletonTask


def task_of(run: Callable[..., Any], lock_key: Any = None, *, lock_name: str = "task") -> Any:
    """A task with this body and `lock_key`."""
    app: Any = Celery("keys", set_as_current=False)
    app.conf.update(broker_url="memory://", singleton_lock_prefix="p")
    if run.__name__ == "<lambda>":
        run.__name__ = "run"  # Celery makes a function of that name.
    options = {"name": "task", "lock_name": lock_name, "lock_key": lock_key}
    return app.task(base=SingletonTask, shared=False, lazy=False, **options)(run)


def lock_of(task: Any, args: Any, kwargs: Any, *, chosen: str | None = None) -> Any:
    """The key and the label of a message with these arguments, or with a text that its caller chose instead."""
    call = {} if chosen is None else {"singleton_lock": {"key": chosen}}
    return task.lock_of(Context(delivery_info={}, **call), args, kwargs)


def seen_by_lock_key(run: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any] | None:
    """What a callable `lock_key` gets of a call; None if the call does not fit, and it is not asked."""
    seen: list[dict[str, Any]] = []
    lock_of(task_of(run, seen.append), args, kwargs)
    return seen[0] if seen else None
