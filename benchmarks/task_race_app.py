"""The app of the task race: the same tasks for each way to lock, which the environment names."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery

import tests.integration.ready  # noqa: F401
from benchmarks.tasks import RACERS
from tests import recording

#: Seconds after which a lock is free even if nobody freed it. Packages take whole seconds.
TIMEOUT = 4

#: Seconds after which a task ends by itself.
LONG = 60.0

#: Environment variables that name the contestant, and the host on which a worker believes to be.
CONTESTANT, HOST = "TASK_RACE_CONTESTANT", "TASK_RACE_HOST"


def make(contestant: str, conf: Mapping[str, Any]) -> Celery:
    """An app with the contestant's tasks, for workers and senders."""
    app = Celery("task_race", set_as_current=False)
    app.conf.update(worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True, **conf)
    options = {"bind": True, "shared": False, **RACERS[contestant](TIMEOUT)}

    @app.task(name="work", **options)
    def work(self: Any, job: str, seconds: float) -> None:
        _work(self, job, seconds)

    @app.task(name="late", acks_late=True, reject_on_worker_lost=True, **options)
    def late(self: Any, job: str, seconds: float) -> None:
        _work(self, job, seconds)

    @app.task(name="retrying", **options)
    def retrying(self: Any, job: str, seconds: float) -> None:
        _work(self, job, seconds)
        if self.request.retries < 2:
            raise self.retry(countdown=0.5)

    @app.task(name="step", shared=False)
    def step() -> None:
        pass

    return app


def over(record: Path, job: str) -> Path:
    """The file that ends all runs of a job."""
    return record.with_name(f"{job}.over")


def _work(task: Any, job: str, seconds: float) -> None:
    """Run for that many seconds, or until the job is over."""
    end = over(Path(os.environ[recording.VARIABLE]), job)
    with recording.run(job, task.request.id):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not end.exists():
            time.sleep(0.02)


if CONTESTANT in os.environ:
    socket.gethostname = partial(os.environ.__getitem__, HOST)
    app = make(os.environ[CONTESTANT], json.loads(os.environ["TEST_CONF"]))
