"""Plain tasks that send exclusive ones, or that Celery sends exclusive ones on for."""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery
from celery.result import allow_join_result

import tests.integration.ready  # noqa: F401
from celery_singleton_lock import LockUnavailable, SingletonTask
from tests import recording
from tests.patience import LIMIT

app = Celery("tests.integration.plain_app", **json.loads(os.environ["TEST_CONF"]))


@app.task(name="once", base=SingletonTask, bind=True)
def once(self: Any, job: str) -> str:
    with recording.run(job, self.request.id):
        return job


@app.task(name="locked", base=SingletonTask, lock_scope="until_executed", on_send_unavailable="raise")
def locked(job: str) -> str:
    return job


@app.task(name="plain")
def plain() -> str:
    return "plain"


@app.task(name="fails")
def fails() -> None:
    raise ValueError("as told")


@app.task(name="replaced", bind=True)
def replaced(self: Any) -> Any:
    raise self.replace(locked.si("replaced"))


@app.task(name="sends_twice")
def sends_twice(job: str, task_id: str) -> None:
    for _ in range(2):
        result = once.apply_async((job,), task_id=task_id)
        with allow_join_result():
            result.get(timeout=LIMIT)


@app.task(name="sends_linked")
def sends_linked(job: str) -> str:
    try:
        locked.apply_async((job,), link=plain.si())
    except LockUnavailable as error:
        return type(error).__name__
    return "sent"
