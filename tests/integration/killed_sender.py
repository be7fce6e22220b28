"""Sends a message and kills itself at a step: `python -m tests.integration.killed_sender TASK STEP COUNTDOWN`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from celery import Celery

from celery_singleton_lock.in_bulk import Confirmations
from celery_singleton_lock.task.queue_lock import QueueLock
from tests.integration.queued_tasks import define

#: Before which call it kills itself, by step.
STEPS: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "lock is asked for": lambda app: (app.amqp, "create_task_message"),
    "lock is had": lambda app: (app.backend, "on_task_call"),
    # Our code, not Celery, makes this call, once it is known which message has the lock.
    "other is found": lambda app: (app, "send_task"),
    "message is sent": lambda app: (QueueLock, "request_in_order"),
    "old one is superseded": lambda app: (Confirmations, "add"),
}


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(task: str, step: str, countdown: str) -> None:
    app = Celery("sender", set_as_current=False)
    app.conf.update(json.loads(os.environ["TEST_CONF"]))
    job = getattr(define(app), task)
    setattr(*STEPS[step](app), die)
    job.apply_async(("report",), countdown=float(countdown))


if __name__ == "__main__":
    main(*sys.argv[1:])
