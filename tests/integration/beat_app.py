"""The app that the beats of the integration tests send from; set up by the environment that a test gives it."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from celery import Celery
from celery.schedules import crontab
from celery.signals import after_task_publish, before_task_publish

from celery_singleton_lock import SingletonTask, clock
from tests import appended, recording

#: Seconds by which the clock of this host is ahead.
SKEW = float(os.environ.get("TEST_SKEW", "0"))


class Skewed(Celery):
    """An app on a host whose clock is wrong."""

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=SKEW)


app = Skewed("tests.integration.beat_app")
clock.wall = lambda: time.time() + SKEW  # type: ignore[assignment]
app.conf.update(worker_hijack_root_logger=True, **json.loads(os.environ["TEST_CONF"]))

#: Entries by name: seconds, or "crontab" for every minute.
SCHEDULE: dict[str, Any] = json.loads(os.environ["TEST_SCHEDULE"])

app.conf.beat_schedule = {
    name: {
        "task": "tests.integration.beat_app.job",
        "schedule": crontab() if every == "crontab" else every,
        "args": (name,),
    }
    for name, every in SCHEDULE.items()
}


@app.task(base=SingletonTask, bind=True)
def job(self: Any, name: str) -> None:
    with recording.run(name, self.request.id):
        due = self.request.get("singleton_lock", {}).get("due")
        appended.append(
            os.environ["TEST_RUNS"], {"entry": name, "task_id": self.request.id, "due": due, "at": time.time()}
        )


def _stall(moment: str) -> None:
    """Delay one send: the file says at which moment, and for how many seconds."""
    file = Path(os.environ["TEST_STALL"])
    if not file.exists():
        return
    wanted, seconds = file.read_text().split()
    if wanted == moment:
        file.unlink()
        time.sleep(float(seconds))


@before_task_publish.connect
def _before(**_: Any) -> None:
    _stall("before")


@after_task_publish.connect
def _after(**_: Any) -> None:
    _stall("after")
