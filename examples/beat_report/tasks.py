"""A report that is due every second and takes longer than that: beat sends on time, the lock keeps the runs apart.

    celery -A examples.beat_report.tasks beat        # as many as you like
    celery -A examples.beat_report.tasks worker

A tick that finds the report still running is skipped (REVOKED), so no queue builds up behind a slow report.
"""

from __future__ import annotations

import os
import time

from celery import Celery

from celery_singleton_lock import SingletonTask, clock

app = Celery("beat_report", broker="redis://localhost:6379/0", backend="redis://localhost:6379/1")
app.conf.beat_schedule = {
    "report": {"task": "examples.beat_report.tasks.report", "schedule": 1.0, "options": {"expires": 10}},
}

#: The file to which each run of the report adds a line.
LOG = os.environ.get("REPORT_LOG", "report.log")

#: Seconds that a report takes.
DURATION = 2.5


@app.task(base=SingletonTask)
def report() -> None:
    begun = clock.now()
    time.sleep(DURATION)
    with open(LOG, "a") as log:
        log.write(f"{begun} {clock.now()}\n")
