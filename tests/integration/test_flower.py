"""Flower shows, with this package, what happened to each copy."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from tests import ports
from tests.integration.conftest import LONG, Shop, until
from tests.integration.workers import Process, environment
from tests.patience import LIMIT

pytest.importorskip("flower")

pytestmark = pytest.mark.slow

#: Seconds of leases: no test here waits for the end of one, and a busy machine stops no process for so long.
TTL = 60.0

TASK = "tests.integration.app.exclusive"


class Flower(Process):
    """A `celery flower`."""

    def __init__(self, shop: Shop) -> None:
        self._url = f"http://127.0.0.1:{(port := ports.free())}/api/"
        env = environment(shop.conf, events=shop.events, record=shop.record.path)
        super().__init__(
            "flower",
            "tests.integration.app",
            ["flower", "--address=127.0.0.1", f"--port={port}"],
            directory=shop.directory,
            environment={**env, "FLOWER_UNAUTHENTICATED_API": "1"},
        )

    def ask(self, path: str) -> dict[str, Any]:
        """An answer of its API; empty as long as there is no answer."""
        with suppress(OSError):
            answer: dict[str, Any] = json.loads(urllib.request.urlopen(self._url + path, timeout=LIMIT).read())
            return answer
        return {}

    def states(self) -> dict[str, str]:
        return {task_id: task["state"] for task_id, task in self.ask("tasks").items()}


@contextmanager
def flower(shop: Shop) -> Iterator[Flower]:
    """Start Flower, and wait until it receives events."""
    with Flower(shop) as started:
        until(lambda: started.ask("workers"), "Flower knows the worker")
        yield started


def test_a_skipped_copy_is_revoked_and_the_run_a_success(shop: Shop) -> None:
    shop.start("one", arguments=("-E",))
    with flower(shop) as page:
        running = shop.send("exclusive", "report", LONG)
        shop.record.wait_for(starts=1)
        copy = shop.send("exclusive", "report")
        with pytest.raises(TaskRevokedError):
            copy.get(timeout=LIMIT)
        until(lambda: page.states() == {running.id: "STARTED", copy.id: "REVOKED"}, "Flower shows the skipped copy")
        shop.record.let_end("report")
        assert running.get(timeout=LIMIT) == "report"
        until(lambda: page.states() == {running.id: "SUCCESS", copy.id: "REVOKED"}, "Flower shows the run's end")
        assert page.ask(f"task/info/{copy.id}")["name"] == TASK
