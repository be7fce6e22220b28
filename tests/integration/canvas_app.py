"""The app of the matrix of canvas: the same tasks on the stock Task and on SingletonTask; the sender has their code as
well.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

from celery import Celery, Task
from celery.signals import worker_ready
from redis import Redis

from celery_singleton_lock import SingletonTask

#: Base and options of each family. In a `wide` family, overlapping sends with the same arguments meet no held lock.
FAMILIES: dict[str, dict[str, Any]] = {
    "stock": {"base": Task},
    "own": {"base": SingletonTask},
    "wide": {"base": SingletonTask, "lock_limit": 100},
}


def make(conf: dict[str, Any], record: Redis) -> Celery:
    """An app with all families; `record` is where tasks write what ran."""
    made = Celery("canvas", set_as_current=False)
    made.conf.update(conf)
    for name, options in FAMILIES.items():
        setattr(made, name, _family(made, record, name, options))
    return made


def _family(app: Celery, record: Redis, family: str, options: dict[str, Any]) -> SimpleNamespace:
    def ran(tag: str, *what: object) -> None:
        record.rpush(f"ran:{family}:{tag}", json.dumps(what))

    def task(**more: Any) -> Any:
        return lambda body: app.task(name=f"{family}.{body.__name__}", **options, **more)(body)

    @task()
    def step(*given: Any, tag: str, name: str) -> Any:
        """A step of a canvas: returns what it was given."""
        ran(tag, name, given)
        return [name, *given]

    @task()
    def number(*given: Any, tag: str, name: str) -> int:
        ran(tag, name, given)
        return 1 + sum(sum(it) if isinstance(it, list) else it for it in given)

    @task()
    def item(pair: Any, tag: str | None = None) -> Any:
        """A part of `map` and the like, which pass positional arguments only."""
        tag, name = (pair, tag) if isinstance(pair, str) else pair[:2]
        ran(str(tag), name)
        return name

    @task()
    def fail(*given: Any, tag: str, name: str) -> None:
        ran(tag, name, given)
        raise ValueError(name)

    @task()
    def caught(*given: Any, tag: str, name: str) -> None:
        """An errback, called in whichever way Celery calls it."""
        ran(tag, name)

    @task()
    def caught_by_message(task_id: str, tag: str, name: str) -> None:
        """An errback that is sent as a task."""
        ran(tag, name)

    @task(bind=True)
    def replaced(self: Any, *given: Any, tag: str, name: str, by: str = "step") -> Any:
        ran(tag, name, given)
        new = step.si(tag=tag, name=f"{name}'")
        if by == "chain":
            new |= step.s(tag=tag, name=f"{name}''")
        raise self.replace(new)

    @task(bind=True)
    def replaced_by_itself(self: Any, *given: Any, tag: str, name: str, left: int = 1) -> Any:
        ran(tag, name, given, left)
        if not left:
            return name
        raise self.replace(self.si(tag=tag, name=name, left=left - 1))

    @task(bind=True, max_retries=2)
    def retried(self: Any, *given: Any, tag: str, name: str) -> Any:
        ran(tag, name, given, self.request.retries)
        if self.request.retries < 1:
            # Celery stores RETRY after it has sent the next attempt: it may overwrite what a quick attempt has stored.
            raise self.retry(countdown=0.5)
        return name

    tasks = (step, number, item, fail, caught, caught_by_message, replaced, replaced_by_itself, retried)
    return SimpleNamespace(**{task.name.rpartition(".")[2]: task for task in tasks})


if "TEST_EVENTS" in os.environ:  # In a worker.
    events = Redis.from_url(os.environ["TEST_EVENTS"])
    app = make(json.loads(os.environ["TEST_CONF"]), events)

    @worker_ready.connect
    def _ready(sender: Any, **_: Any) -> None:
        """Notify the test, which waits at this list."""
        events.lpush(f"ready:{sender.hostname}", 1)
