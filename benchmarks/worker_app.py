"""The app of the worker benchmark: one task that does nothing, once per way to lock it."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import celery_once
import celery_singleton
from celery import Celery

from benchmarks.locked_task import LockedTask
from benchmarks.locks import TTL
from celery_singleton_lock import SingletonTask

#: Where the tasks say when they ran: 8 bytes each, a double of CLOCK_MONOTONIC.
FILE = "BENCHMARK_FILE"

#: URL of the broker, which keeps all locks as well.
BROKER = "BENCHMARK_BROKER"

#: The queue from which the worker takes a whole batch.
QUEUE = "batch"

app = Celery("benchmarks", broker=os.environ.get(BROKER), set_as_current=False)
app.conf.update(
    task_ignore_result=True,
    task_default_queue=QUEUE,
    worker_redirect_stdouts=False,
    ONCE={
        "backend": "celery_once.backends.Redis",
        "settings": {"url": app.conf.broker_url, "default_timeout": int(TTL)},
    },
)


@lru_cache(maxsize=1)
def _file(pid: int) -> int:
    return os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _task(name: str, **options: Any) -> Any:
    def body(number: int) -> None:
        os.write(_file(os.getpid()), struct.pack("d", time.monotonic()))

    return app.task(name=name, **options)(body)


TASKS: Mapping[str, Any] = {
    "plain Task": _task("plain"),
    "ours: SingletonTask": _task("ours", base=SingletonTask),
    "plain Task, acks_late": _task("plain_late", acks_late=True),
    "ours: SingletonTask, acks_late": _task("ours_late", base=SingletonTask, acks_late=True),
    "redis-py Lock in the task": _task("locked", base=LockedTask, lock_seconds=TTL),
    "celery-singleton": _task("singleton", base=celery_singleton.Singleton, lock_expiry=int(TTL)),
    "celery-once": _task("once", base=celery_once.QueueOnce),
}
