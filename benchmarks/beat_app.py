"""The apps of the beat benchmark: in its process with a thousand entries, and for real beats with none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from celery import Celery

#: For the real beats: URLs of the broker and of the locks, which have their own server; and the seconds between two
#: looks at the schedule, if that is not the default.
BROKER, LOCKS, LOOP = "BENCHMARK_BROKER", "BENCHMARK_LOCKS", "BENCHMARK_LOOP"

#: Where the messages go.
QUEUE = "ticks"


def make(broker: str, locks: str, settings: Mapping[str, Any]) -> Celery:
    """An app with one task."""
    made = Celery("benchmarks", broker=broker, set_as_current=False)
    made.conf.update(task_ignore_result=True, task_default_queue=QUEUE)
    made.conf.update(singleton_lock_backend=locks, redbeat_redis_url=locks, **settings)
    made.task(_nothing, name="nothing")
    return made


def _nothing(number: int) -> None: ...


_loop = {"beat_max_loop_interval": float(os.environ[LOOP])} if LOOP in os.environ else {}

app = make(os.environ.get(BROKER, ""), os.environ.get(LOCKS, ""), _loop)
