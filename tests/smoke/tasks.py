"""The tasks of the worker containers; pytest-celery puts this file into them."""

from __future__ import annotations

import os
from typing import Any

from celery import shared_task
from redis import Redis

from celery_singleton_lock import SingletonTask, clock
from examples.containers.record import run

__all__ = ["work"]

# The tests import this file, too, and have no record to connect to.
record = Redis.from_url(os.environ.get("RECORD_URL", "redis://"))


@shared_task(bind=True, base=SingletonTask, name="work", lock_key=["job"])
def work(self: Any, job: str, seconds: float, step: float = 0.05) -> str:
    """Record a step of `job` at intervals of that many seconds."""
    with run(record, self, job) as record_step:
        until = clock.now() + seconds
        while clock.now() < until:
            clock.sleep(step)
            record_step()
    return job
