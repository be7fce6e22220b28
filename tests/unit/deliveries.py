"""Tasks that list their runs, and requests of their messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.task.message import HEADER
from celery_singleton_lock.task.turn import turn_of

_numbers = itertools.count()


def make(app: Celery, body: Any, **options: Any) -> Any:
    """A task and the list of its runs."""
    runs: list[str] = []

    def job(self: Any) -> Any:
        runs.append(self.request.id)
        return body()

    task = app.task(bind=True, base=SingletonTask, shared=False, name=f"job{next(_numbers)}", **options)(job)
    return task, runs


def bound(app: Celery, body: Callable[[Any], Any] = lambda self: None) -> Any:
    """A task whose body gets the task itself."""

    def job(self: Any) -> Any:
        return body(self)

    return app.task(bind=True, base=SingletonTask, shared=False, name=f"job{next(_numbers)}")(job)


def id_for(task: Any) -> str:
    """An id of this app alone, since all apps share the result backend in memory."""
    return f"id-{task.app.main}"


def request_of(task: Any, *, carries: Any = None, **request: Any) -> dict[str, Any]:
    """The request of a message, whose header has these parts."""
    request = {
        "id": id_for(task),
        "called_directly": False,
        "is_eager": False,
        "delivery_info": {},
        "retries": 0,
        **request,
    }
    return request if carries is None else {**request, HEADER: {"id": request["id"], **carries}}


@contextmanager
def carried_out(task: Any, request: Context) -> Iterator[None]:
    """As if a worker were carrying out the request."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("celery_singleton_lock.task.sending.current_worker_task", lambda: task)
    monkeypatch.setattr("celery_singleton_lock.task.singleton_task.current_worker_task", lambda: task)
    task.request_stack.push(request)
    if turn_of(request).in_body is None:
        turn_of(request).in_body = False
    try:
        yield
    finally:
        task.request_stack.pop()
        monkeypatch.undo()
