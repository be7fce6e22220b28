"""The tasks of the demo: one exclusive, one plain, and a record of who ran when."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery
from celery.signals import worker_ready
from redis import Redis

from celery_singleton_lock import LockConflict, SingletonTask, clock, lock_conflict

#: Seconds that a lock outlives its worker; short, so that the demo shows it.
TTL = 2.0

app = Celery("demo", broker=os.environ["DEMO_REDIS"], backend=os.environ["DEMO_REDIS"])
app.conf.update(singleton_lock_ttl=TTL, worker_prefetch_multiplier=1, broker_connection_retry_on_startup=True)

record = Redis.from_url(os.environ["DEMO_REDIS"])


@app.task(bind=True, base=SingletonTask)
def exclusive(self: Any, job: str, seconds: float) -> None:
    work(self, job, seconds)


@app.task(bind=True)
def plain(self: Any, job: str, seconds: float) -> None:
    work(self, job, seconds)


def work(task: Any, job: str, seconds: float) -> None:
    write(event="start", job=job, id=task.request.id, worker=task.request.hostname)
    time.sleep(seconds)
    write(event="end", job=job, id=task.request.id, worker=task.request.hostname)


@lock_conflict.connect
def skipped(sender: Any, task_id: str, conflict: LockConflict, **_: Any) -> None:
    write(event="skipped", job="report", id=task_id, worker=sender.request.hostname)


@worker_ready.connect
def ready(**_: Any) -> None:
    record.lpush("ready", 1)


def write(**event: Any) -> None:
    record.rpush("record", json.dumps({**event, "at": clock.now(), "pid": os.getpid()}))
