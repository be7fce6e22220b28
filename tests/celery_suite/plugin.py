"""A pytest plugin for each run of Celery's tests: notes each test's outcome, and makes the tasks exclusive."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

#: The file for the outcome of each test.
OUTCOMES = "CELERY_SUITE_OUTCOMES"

#: URL of the lock server; if it is not set, tasks are Celery's own.
LOCKS = "CELERY_SUITE_LOCKS"

#: Seconds that our threads get to end by themselves.
PATIENCE = 10

#: Outcomes by test; the last try counts.
_outcomes: dict[str, str] = {}


def pytest_configure() -> None:
    if url := os.environ.get(LOCKS):
        _make_exclusive(url)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "setup":
        _outcomes[report.nodeid] = "passed"
    if report.failed:
        _outcomes[report.nodeid] = "failed"
    elif report.skipped and _outcomes.get(report.nodeid) == "passed":
        _outcomes[report.nodeid] = "skipped"  # Including a test that was expected to fail, and did.


def pytest_sessionfinish() -> None:
    Path(os.environ[OUTCOMES]).write_text(json.dumps(_outcomes))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Wait before Celery's fixtures look for threads: ours end by themselves, some just after a worker's last task.

    Unit tests reuse one task id, each for another message: so the lock server forgets it.
    """
    if _forget is not None and "/unit/" in item.nodeid:
        for thread in threading.enumerate():
            if thread.name.startswith("singleton-lock-"):
                thread.join(PATIENCE)
        _forget()


_forget: Callable[[], object] | None = None


def _make_exclusive(url: str) -> None:
    from celery import Celery
    from redis import Redis

    from celery_singleton_lock import SingletonTask, background, heartbeat, in_bulk
    from celery_singleton_lock.options.app import Settings

    global _forget
    _forget = Redis.from_url(url).flushdb
    Celery.task_cls = SingletonTask
    # Each of hundreds of tests waits for our threads to end: ending them sooner changes nothing else.
    heartbeat.MAX_SLEEP = background.LINGER = 0.05
    in_bulk.REWRITE_AFTER = 0.02
    from_app = Settings.from_app

    def on_the_server(app: Any, **_: Any) -> Settings:
        # Celery's unit tests have their broker in memory, and by default the locks would be there, too.
        # No journal: its thread writes a few seconds after a task, and Celery's tests tolerate no remaining thread.
        return replace(from_app(app, backend=url), journal=0)

    setattr(Settings, "from_app", on_the_server)  # noqa: B010 - which is no class method
