"""A schedule for two beats, and two jobs for two workers: what docker-compose.yml starts.

`tick` is quick, and one of the beats sends it every second. `report` is sent every second, too, and takes longer
than that: a copy that finds it running is skipped.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import after_task_publish
from redis import Redis

from celery_singleton_lock import SingletonTask, clock
from examples.containers import TTL
from examples.containers.record import SENT, run

#: Seconds after which a Redis broker delivers an unacknowledged message again; longer than any job.
VISIBILITY = 10.0

#: Seconds that a report takes, in steps.
DURATION, STEP = 5.0, 0.1

app = Celery("containers", broker="redis://localhost:6379/0", backend="redis://localhost:6379/1")
app.conf.update(
    beat_schedule={
        "tick": {"task": "examples.containers.tasks.tick", "schedule": 1.0},
        "report": {"task": "examples.containers.tasks.report", "schedule": 1.0},
    },
    singleton_lock_ttl=TTL,
    singleton_lock_beat_ttl=TTL,
    # A message is acknowledged when its task has ended: the messages of a killed worker are delivered again.
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    broker_transport_options={"visibility_timeout": VISIBILITY},
    broker_connection_retry_on_startup=True,
)
if "SINGLETON_LOCK_BACKEND" in os.environ:
    app.conf.singleton_lock_backend = os.environ["SINGLETON_LOCK_BACKEND"]

record = Redis.from_url(os.environ.get("RECORD_URL", "redis://localhost:6379/2"))


# No tick is skipped: if one is delivered again together with the next, it waits for it.
@app.task(bind=True, base=SingletonTask, lock_wait=10)
def tick(self: Any) -> None:
    with run(record, self, "tick"):
        pass


@app.task(bind=True, base=SingletonTask)
def report(self: Any) -> None:
    with run(record, self, "report") as step:
        until = clock.now() + DURATION
        while clock.now() < until:
            clock.sleep(STEP)
            step()


@after_task_publish.connect(sender=tick.name)
def sent(headers: dict[str, Any], **_: Any) -> None:
    """Beat has sent a message: note its id, to check afterwards whether it ran."""
    record.sadd(SENT, headers["id"])
