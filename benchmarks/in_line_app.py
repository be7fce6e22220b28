"""The app of the benchmark `in_line`: tasks with one lock, which write down when they ran, and one task without."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery

from celery_singleton_lock import SingletonTask

_SERVER = os.environ.get("BENCHMARK_BROKER", "")

app = Celery("in_line", broker=os.environ.get("BENCHMARK_AMQP") or _SERVER, set_as_current=False)
app.conf.update(task_ignore_result=True, singleton_lock_backend=_SERVER, worker_redirect_stdouts=False)


def _write(**fields: Any) -> None:
    with open(os.environ["BENCHMARK_FILE"], "a") as file:
        file.write(json.dumps(fields) + "\n")


def _body(key: str, number: int, seconds: float) -> None:
    began = time.time()
    time.sleep(seconds)
    _write(key=key, number=number, began=began, ended=time.time())


_OPTIONS: dict[str, Any] = {"base": SingletonTask, "lock_key": ["key"], "lock_name": "in-line"}

TASKS = {
    "retry": app.task(name="retry", on_conflict="retry", **_OPTIONS)(_body),
    "lock_wait": app.task(name="lock_wait", lock_wait=600, **_OPTIONS)(_body),
}


@app.task
def beside(sent: float) -> None:
    """Other work."""
    _write(key="beside", late=time.time() - sent)
