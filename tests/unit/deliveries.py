"""Tasks whose runs are counted, and messages that are delivered to them."""

from __future__ import annotations

import itertools
from typing import Any

from celery import Celery

from celery_singleton_lock import SingletonTask

_numbers = itertools.count()


def make(app: Celery, body: Any, **options: Any) -> Any:
    """A task and the list of its runs."""
    runs: list[str] = []

    def job(self: Any) -> Any:
        runs.append(self.request.id)
        return body()

    task = app.task(bind=True, base=SingletonTask, shared=False, name=f"job{next(_numbers)}", **options)(job)
    return task, runs


def id_for(task: Any) -> str:
    """The result backend in memory is one for all apps."""
    return f"id-{task.app.main}"


def deliver(task: Any, **request: Any) -> Any:
    """Call the task as a worker does with a message; what it returns or raises."""
    task.push_request(
        **{
            "id": id_for(task),
            "called_directly": False,
            "is_eager": False,
            "delivery_info": {},
            "retries": 0,
            **request,
        }
    )
    try:
        return task()
    finally:
        task.pop_request()
