"""The app that the beats of the integration tests send from; set up by the environment that a test gives it."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import Celery
from celery.schedules import crontab

from celery_singleton_lock import SingletonTask
from tests import appended, recording

app = Celery("tests.integration.beat_app")
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
