"""The app of the task race: the same tasks on one base class, that of the contestant whom the environment names."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_ready
from redis import Redis

from benchmarks.locked_task import LockedTask
from tests import recording

#: Seconds after which a lock is free though nobody freed it. Packages take whole ones.
TIMEOUT = 4

#: Names the contestant.
CONTESTANT = "TASK_RACE_CONTESTANT"

#: Names the host that a worker takes its own for.
HOST = "TASK_RACE_HOST"

#: Seconds after which a task ends that is never told to.
LONG = 60.0


def _singleton() -> Mapping[str, Any]:
    from celery_singleton import Singleton

    return {"base": Singleton}


def _once() -> Mapping[str, Any]:
    from celery_once import QueueOnce

    return {"base": QueueOnce, "once": {"graceful": True}}


def _heimdall() -> Mapping[str, Any]:
    from celery_heimdall import HeimdallTask

    class OnLockServer(HeimdallTask):
        abstract = True

        def setup_redis(self) -> Redis:
            return Redis.from_url(self.app.conf.singleton_lock_backend)

    return {"base": OnLockServer, "heimdall": {"unique": True, "unique_timeout": TIMEOUT}}


def _ours() -> Mapping[str, Any]:
    from celery_singleton_lock import SingletonTask

    return {"base": SingletonTask}


#: The options of each one's tasks, as its README has them.
CONTESTANTS: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "plain `Task`": dict,
    "`redis.lock` in the task": lambda: {
        "base": LockedTask,
        "server_setting": "singleton_lock_backend",
        "lock_seconds": TIMEOUT,
    },
    "celery-singleton": _singleton,
    "celery-singleton, `lock_expiry`": lambda: {**_singleton(), "lock_expiry": TIMEOUT},
    "celery-once": _once,
    "celery-heimdall": _heimdall,
    "ours": _ours,
}


def settings(locks: str) -> dict[str, Any]:
    """Where each one's locks are, and how long they last."""
    return {
        "singleton_backend_url": locks,
        "ONCE": {"backend": "celery_once.backends.Redis", "settings": {"url": locks, "default_timeout": TIMEOUT}},
        "singleton_lock_backend": locks,
        "singleton_lock_ttl": float(TIMEOUT),
    }


def make(contestant: str, conf: Mapping[str, Any]) -> Celery:
    """An app with the contestant's tasks, to work for or to send from."""
    app = Celery("task_race", set_as_current=False)
    app.conf.update(worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True, **conf)
    options = CONTESTANTS[contestant]()
    task = partial(app.task, shared=False)

    @task(name="work", bind=True, **options)
    def work(self: Any, job: str, seconds: float) -> None:
        _work(self, job, seconds)

    @task(name="late", bind=True, acks_late=True, reject_on_worker_lost=True, **options)
    def late(self: Any, job: str, seconds: float) -> None:
        _work(self, job, seconds)

    @task(name="retrying", bind=True, **options)
    def retrying(self: Any, job: str, seconds: float) -> None:
        _work(self, job, seconds)
        if self.request.retries < 2:
            raise self.retry(countdown=0.5)

    @task(name="step")
    def step() -> None:
        pass

    return app


def over(record: Path, job: str) -> Path:
    """The file that ends all runs of a job."""
    return record.with_name(f"{job}.over")


def _work(task: Any, job: str, seconds: float) -> None:
    """Run for so long, or until the job is over."""
    end = over(Path(os.environ[recording.VARIABLE]), job)
    with recording.run(job, task.request.id):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not end.exists():
            time.sleep(0.02)


@worker_ready.connect
def _ready(sender: Any, **_: Any) -> None:
    """Tell the race, which waits at this list."""
    with Redis.from_url(os.environ["TEST_EVENTS"]) as client:
        client.lpush(f"ready:{sender.hostname}", 1)


if CONTESTANT in os.environ:
    socket.gethostname = partial(os.environ.__getitem__, HOST)
    app = make(os.environ[CONTESTANT], json.loads(os.environ["TEST_CONF"]))
