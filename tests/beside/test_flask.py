"""Flask: a task runs in the application's context and under its lock, or is refused."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from tests.beside.conftest import conf_of
from tests.beside.environments import python_of
from tests.patience import LIMIT
from tests.programs import ROOT
from tests.recording import Record
from tests.redis_server import RedisServer

pytestmark = pytest.mark.slow

APP = "tests.beside.apps.flask_app"

#: Equal calls that are sent at once, and slots for all of them.
CALLS = 4


def test_class_of_flasks_documentation_before_ours_is_refused(worker_with: Callable[..., Any]) -> None:
    with pytest.raises(
        AssertionError, match=r"FlaskTask\.__call__ calls `run` itself.*class FlaskFirst\(SingletonTask, Fl"
    ):
        worker_with(APP, group="beside", test_order="flask")


def test_equal_calls_run_one_at_a_time_in_the_context(
    worker_with: Callable[..., Any], record: Record, redis_server: RedisServer
) -> None:
    worker_with(APP, group="beside", concurrency=CALLS, test_order="exclusive")
    app = Celery(set_as_current=False)
    app.conf.update(conf_of(redis_server))
    running = app.send_task("rebuild", ("report",))
    record.wait_for(starts=1)
    for copy in [app.send_task("rebuild", ("report",)) for _ in range(CALLS - 1)]:
        with pytest.raises(TaskRevokedError, match=running.id):
            copy.get(timeout=LIMIT)
    record.let_end("report")
    assert running.get(timeout=LIMIT) == "Berlin"
    assert len(record.runs("report")) == 1
    assert app.send_task("plain").get(timeout=LIMIT) == "Berlin"


def test_page_does_what_it_shows() -> None:
    command = [python_of("beside"), "-m", "tests.pages", "docs/howto/flask.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
