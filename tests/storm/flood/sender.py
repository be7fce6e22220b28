"""`python -m tests.storm.flood.sender SEED SENDS JOBS SCOPE,…`: sends jobs as fast as it can, and records each.

It writes a line before a message is sent, and a line with the outcome: if it is killed in between, only the first line
is there.
"""

from __future__ import annotations

import json
import os
import random
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from celery_singleton_lock import DuplicateResult
from tests.storm import history
from tests.storm.broker import report_queue
from tests.storm.flood.app import make
from tests.storm.flood.rules import Rules


def main(seed: str, sends: str, jobs: str, scopes: str) -> None:
    report_queue()
    app = make(json.loads(os.environ["TEST_CONF"]), Rules.of_environment())
    chance = random.Random(seed)
    for scope, job in drawn(chance, int(sends), int(jobs), scopes.split(",")):
        send(app, scope, job)


def drawn(chance: random.Random, sends: int, jobs: int, scopes: Sequence[str]) -> list[tuple[str, str]]:
    """The jobs to send, each about as often as any other."""
    every = [(scope, f"job {number}") for scope in scopes for number in range(jobs)]
    found: list[tuple[str, str]] = []
    while len(found) < sends:
        found += chance.sample(every, min(len(every), sends - len(found)))
    return found


def send(app: Any, scope: str, job: str) -> str:
    """Send a job; returns the id of its message, even if another one has the lock and none was sent."""
    message = str(uuid.uuid4())
    history.write("sending", message=message, scope=scope, job=job)
    try:
        result = app.tasks[scope].apply_async((job,), task_id=message)
    except Exception as error:  # noqa: BLE001 - whatever the broker's client raises: it may have the message
        history.write("unsure", message=message, why=type(error).__name__)
        return message
    if isinstance(result, DuplicateResult):
        history.write("duplicate", message=message, of=result.id)
    else:
        history.write("sent", message=message)
    return message


if __name__ == "__main__":
    main(*sys.argv[1:])
