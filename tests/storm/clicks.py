"""`python -m tests.storm.clicks`: sends jobs that have a lock while they wait, as fast as somebody clicks.

It writes what it is about to send, and then the outcome; if it is killed in between, only the first line is there.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from typing import Any

from celery_singleton_lock import DuplicateResult
from tests.storm import app as storm
from tests.storm import history

#: Jobs that are sent, and the seconds that they take.
JOBS = {"j0": 0.0, "j1": 0.3, "j2": 1.5}


def main() -> None:
    """Send until killed."""
    chance = random.Random(os.getpid())
    while True:
        click(storm.app, chance)
        time.sleep(chance.choice((0.0, 0.1, 0.3)))


def click(app: Any, chance: random.Random) -> None:
    """Send one."""
    task, key = chance.choice(sorted(storm.SCOPED)), chance.choice(sorted(JOBS))
    options = {"countdown": chance.uniform(0.2, 2.0)} if chance.random() < 0.1 else {}
    # A signature with an id counts as a part of a canvas, which is sent even if another message has the lock.
    message = str(uuid.uuid4())
    signature = app.tasks[task].si(key, JOBS[key]).set(task_id=message, **options)
    history.write("clicked", message=message, task=task, key=key)
    try:
        result = signature.apply_async()
    except Exception as error:  # noqa: BLE001 - whatever the broker's client raises: it may have the message
        history.write("unsure", message=message, why=type(error).__name__)
        return
    if isinstance(result, DuplicateResult):
        history.write("duplicate", message=message, of=result.id)
    else:
        history.write("sent", message=message, task=task, key=key)


if __name__ == "__main__":
    main()
