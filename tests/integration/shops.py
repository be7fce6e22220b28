"""What tests of tasks need: servers, workers, an app to send from, and the record of what ran."""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery import Celery
from celery.result import AsyncResult
from redis import Redis

from tests.integration.workers import Worker, environment
from tests.patience import until
from tests.recording import Record


@dataclass
class Shop:
    """A broker, a result backend, a lock server, workers, and an app to send from."""

    record: Record
    directory: Path
    conf: dict[str, Any]
    events: str
    exits: ExitStack
    workers: list[Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.app = Celery("sender", set_as_current=False)
        self.app.conf.update(self.conf)

    def start(self, *names: str, pool: str = "prefork", concurrency: int = 2, **options: Any) -> list[Worker]:
        """Start workers with these names at the same time, and wait until they are ready."""
        env = environment(self.conf, events=self.events, record=self.record.path)
        started = [
            self.exits.enter_context(
                Worker(
                    *(name,), directory=self.directory, environment=env, pool=pool, concurrency=concurrency, **options
                )
            )
            for name in names
        ]
        self.workers += started
        return [worker.wait_until_ready() for worker in started]

    def send(self, task: str, *args: Any, **options: Any) -> Any:
        """Send a task by name, like a program that does not have its code."""
        call = options.pop("singleton_lock", None)
        if call is not None:
            options["headers"] = {"singleton_lock": call}
        return self.app.send_task(f"tests.integration.app.{task}", args, **options)

    @property
    def log(self) -> str:
        """The logs of all its workers."""
        return "".join(worker.log for worker in self.workers)

    def refused(self, policy: str) -> set[str]:
        """The ids of the messages that met a held lock. A waiting message may meet it several times."""
        return {*re.findall(rf"\[([^\]\s]+)\] on_conflict={policy}:", self.log)}

    def locks(self) -> Redis:
        """A client of the lock server."""
        return Redis.from_url(self.conf["singleton_lock_backend"])

    def keys(self) -> list[str]:
        """All keys on the lock server."""
        with self.locks() as client:
            return [key.decode() for key in client.scan_iter()]

    def held(self) -> list[str]:
        """The locks that are held."""
        return [key for key in self.keys() if key.endswith(":run")]

    def wait_for_renewals(self, count: int) -> None:
        """Wait until the only lock that is held was renewed so often."""
        (key,) = self.held()
        with self.locks() as client:
            left = client.pttl(key)

            def is_longer() -> bool:
                # Longer than at the last look: the first one may have come just after a renewal.
                nonlocal left
                before, left = left, client.pttl(key)
                assert left > 0, "the lock is free"
                return left > before

            for _ in range(count):
                until(is_longer, "the lock is renewed")

    def state_of(self, result: AsyncResult) -> str:
        """The state as it is stored now: `result.state` is the state when the result was read."""
        state: str = self.app.backend.get_task_meta(result.id, cache=False)["status"]
        return state

    def sign(self, task: str, *args: Any, **options: Any) -> Any:
        return self.app.signature(f"tests.integration.app.{task}", args, **options)
