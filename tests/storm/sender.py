"""`python -m tests.storm.sender LOAD COUNT`: sends that many messages, or goes on until it is killed (0).

It writes a line before a message is sent, and a line with the outcome: if it is killed in between, only the first line
is there.
"""

from __future__ import annotations

import os
import random
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from celery_singleton_lock import DuplicateResult
from celery_singleton_lock.options.rules import SCOPES
from tests.storm import app as storm
from tests.storm import history

#: How many messages may wait in the broker when more are sent.
WAITING = 40


@dataclass(frozen=True)
class Load:
    """What is sent: calls of these tasks, each as likely as any other.

    Attributes:
        jobs: their keys, and the seconds that bodies may take.
        cold: the share of calls with a key that hardly any other call has.
    """

    tasks: Sequence[str]
    jobs: Mapping[str, Sequence[float]]
    cold: float = 0.0


#: One body is longer than a lease.
LOADS: Mapping[str, Load] = {
    "mixed": Load(
        ("work", "work", "joining", "replacing", "paired", *SCOPES),
        {f"h{number}": (0.0, 0.1, 1.0, 6.0) for number in range(4)},
        cold=0.2,
    ),
    "flood": Load(SCOPES, {f"job {number}": (0.01,) for number in range(12)}),
}

#: Options of a call of "work".
CALLS: Sequence[Mapping[str, Any]] = [
    {},
    {"on_conflict": "skip"},
    {"on_conflict": "raise"},
    {"on_conflict": "retry"},
    {"wait": 3.0, "on_conflict": "retry"},
    {"wait": 10.0, "on_conflict": "raise"},
]


def main(load: str, count: str) -> None:
    chance = random.Random(os.getpid())
    for number, (task, key, seconds) in enumerate(drawn(chance, LOADS[load])):
        if count != "0" and number == int(count):
            return
        if task in storm.app.tasks:
            send(storm.app, task, key, seconds, call=chance.choice(CALLS) if task == "work" else {})
        if count == "0":
            time.sleep(0.02)
            _wait_for_workers()


def drawn(chance: random.Random, load: Load) -> Iterator[tuple[str, str, float]]:
    """Calls: task, key, seconds."""
    while True:
        key = chance.choice([*load.jobs])
        cold = f"c{chance.randrange(2000)}" if chance.random() < load.cold else key
        yield chance.choice(load.tasks), cold, chance.choice(load.jobs[key])


def send(app: Any, task: str, key: str, seconds: float, call: Mapping[str, Any] | None = None) -> str:
    """Send a job; returns the id of its message, even if another one has the lock and none was sent."""
    message = str(uuid.uuid4())
    history.write("sending", message=message, task=task, key=key)
    try:
        headers = {"headers": {"singleton_lock": {**call}}} if call else {}
        result = app.tasks[task].apply_async((key, seconds), task_id=message, **headers)
    except Exception as error:  # noqa: BLE001 - whatever a client raises: the broker may have the message
        history.write("unsure", message=message, why=type(error).__name__)
        return message
    history.write("duplicate" if isinstance(result, DuplicateResult) else "sent", message=message)
    return message


def _wait_for_workers() -> None:
    with storm.app.pool.acquire(block=True) as connection:
        while connection.default_channel.client.llen("celery") > WAITING:
            time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
