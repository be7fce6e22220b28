"""A shop that old and new versions of the package can run: its worker, its beat, and a program that sends to it."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

from celery import Celery
from redis import Redis

from celery_singleton_lock import DuplicateTask, SingletonTask

SERVER = os.environ["SHOP"]

app = Celery("shop", broker=f"{SERVER}/0", backend=f"{SERVER}/1", set_as_current=False)
app.conf.update(
    singleton_lock_backend=f"{SERVER}/2",
    singleton_lock_ttl=6,
    singleton_lock_beat_ttl=2,
    beat_schedule={"tick": {"task": "shop.tick", "schedule": timedelta(seconds=0.5), "options": {"queue": "ticks"}}},
    beat_schedule_filename=os.environ.get("SCHEDULE", "schedule"),
    beat_max_loop_interval=0.5,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 3600},
)
# A body waits for longer than the default timeout of a Redis client.
record = Redis.from_url(f"{SERVER}/3", decode_responses=True, socket_timeout=None)


def work(task: Any, job: str) -> str:
    """Record the start, and end on request."""
    side = os.environ["SIDE"]
    record.rpush("record", json.dumps(["start", job, side, task.request.id, time.monotonic()]))
    told = record.blpop([f"end:{job}"], timeout=300)
    record.rpush("record", json.dumps(["end", job, side, task.request.id, time.monotonic()]))
    assert told is not None
    return f"{job} by {side}"


def exclusive(name: str, **options: Any) -> Any:
    return app.task(name=f"shop.{name}", bind=True, base=SingletonTask, lock_key="{job}", **options)(work)


skips = exclusive("skips")
raises = exclusive("raises", on_conflict="raise")
waits = exclusive("waits", on_conflict="retry")
late = exclusive("late", on_conflict="retry", acks_late=True, reject_on_worker_lost=True)
joins = exclusive("joins", on_conflict="join")
reruns = exclusive("reruns", on_conflict="rerun")
pairs = exclusive("pairs", on_conflict="retry", lock_limit=2)
queued = exclusive("queued", lock_scope="until_executed")
starts = exclusive("starts", lock_scope="until_executing")
latest = exclusive("latest", lock_scope="until_executing", on_duplicate="replace")


@app.task(name="shop.tick")
def tick() -> None:
    """Sent by beat, and run by nobody."""


def send(name: str, job: str, queue: str) -> str:
    """The id of the message, or of the message that is already there."""
    try:
        result = app.tasks[f"shop.{name}"].apply_async([job], queue=queue)
    except DuplicateTask as duplicate:
        return f"refused for {duplicate.task_id}"
    return f"{type(result).__name__} {result.id}"


if __name__ == "__main__":
    app.set_current()
    print(send(*sys.argv[1:]))
