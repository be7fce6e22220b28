"""A program that sends calls which are duplicates, and ends right after that, as a short web process does."""

from __future__ import annotations

import json
import os
import sys

from celery import Celery, chain

from celery_singleton_lock import DuplicateTask
from tests.integration.queued_tasks import define


def main(times: int) -> None:
    app = Celery("tests.integration.app")
    app.conf.update(json.loads(os.environ["TEST_CONF"]))
    tasks = define(app)
    for task in (tasks.until_executed, tasks.skips, tasks.raises, tasks.newest):
        for _ in range(times + 1):
            try:
                task.delay("report", 300.0)
            except DuplicateTask:
                assert task is tasks.raises
    chain(tasks.until_executed.si("report", 300.0), tasks.echo.si("after")).delay()


if __name__ == "__main__":
    main(int(sys.argv[1]))
