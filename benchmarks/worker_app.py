"""The app of the worker benchmark: one task that does nothing, once per way to lock it."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from celery import Celery
from redis import Redis

from benchmarks.measure import OWN
from benchmarks.tasks import WAYS, settings

#: Seconds that a lock lasts.
TTL = 30

#: The queue from which the worker takes a whole batch.
QUEUE = "batch"

#: The broker also keeps all locks.
_BROKER = os.environ.get("BENCHMARK_BROKER", "")

app = Celery("benchmarks", broker=_BROKER, set_as_current=False)
app.conf.update(
    task_ignore_result=True, task_default_queue=QUEUE, worker_redirect_stdouts=False, **settings(_BROKER, TTL)
)


@lru_cache(maxsize=1)
def _file(pid: int) -> int:
    return os.open(os.environ["BENCHMARK_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _task(name: str, way: str, **options: Any) -> Any:
    def body(number: int) -> None:
        # Writes when it ran: 8 bytes, a double of CLOCK_MONOTONIC.
        os.write(_file(os.getpid()), struct.pack("d", time.monotonic()))

    return app.task(name=name, **WAYS[way](TTL), **options)(body)


@lru_cache(maxsize=1)
def _client(pid: int) -> Redis:
    return Redis.from_url(_BROKER)


@app.task(name="trips")
def _trips(number: int) -> None:
    _client(os.getpid()).ping()
    os.write(_file(os.getpid()), struct.pack("d", time.monotonic()))
    _client(os.getpid()).ping()


TASKS: Mapping[str, Any] = {
    "plain Task": _task("plain", "plain `Task`"),
    f"{OWN}: SingletonTask": _task("ours", "`SingletonTask`"),
    "plain Task, acks_late": _task("plain_late", "plain `Task`", acks_late=True),
    f"{OWN}: SingletonTask, acks_late": _task("ours_late", "`SingletonTask`", acks_late=True),
    f"{OWN}: until_executed": _task("ours_sent", "`SingletonTask`", lock_scope="until_executed"),
    "two PINGs in the task": _trips,
    "redis-py Lock in the task": _task("locked", "`redis.lock` in the task"),
    "celery-singleton": _task("singleton", "celery-singleton, `lock_expiry`"),
    "celery-once": _task("once", "celery-once"),
}
