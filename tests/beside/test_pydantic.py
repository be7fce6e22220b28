"""pydantic: a call with a model has one key where it is sent and where it runs, in whatever form the model was sent."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.beside.conftest import conf_of
from tests.beside.environments import python_of
from tests.integration.workers import Worker
from tests.patience import until
from tests.programs import ROOT
from tests.recording import Record
from tests.redis_server import RedisServer

pytestmark = pytest.mark.slow

APP = "tests.beside.apps.pydantic_app"

#: The forms in which a program may send one order.
FORMS = ("model", "json", "python", "by_alias", "exclude_unset")


@pytest.fixture
def run(redis_server: RedisServer, tmp_path: Path) -> Callable[..., str]:
    """Run a program of the shop, to its end."""

    def run(module: str, *arguments: str) -> str:
        variables = {"TEST_CONF": json.dumps(conf_of(redis_server)), "SINGLETON_LOCK_RECORD": str(tmp_path / "record")}
        variables |= {"TEST_EVENTS": redis_server.url_of(3)}
        command = [python_of("beside"), "-m", module, *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    return run


@pytest.fixture
def send(run: Callable[..., str]) -> Callable[..., list[dict[str, Any]]]:
    """Send an order in these forms; what each call was answered."""
    return lambda *arguments: [json.loads(line) for line in run(APP, *arguments).splitlines()]


def test_equal_models_run_one_at_a_time(worker_with: Any, send: Any, run: Any, record: Record) -> None:
    worker: Worker = worker_with(APP, group="beside", concurrency=len(FORMS))
    sent = send("path", "7", *FORMS)
    until(lambda: worker.log.count("expected: LockConflict") == len(FORMS) - 1, "all but one are refused")
    assert len(record.wait_for(starts=1)) == 1
    assert len({each["key"] for each in sent}) == 1
    key = sent[0]["key"]
    held = run("celery", "-A", APP, "locks", "list", "--keys")
    assert key in held, "the key that the caller knows is the one that is held"
    for spelled in ('order={"id": 7}', 'order={"orderId": 7, "number": "x"}', '{"id": 7}'):
        assert key in run("celery", "-A", APP, "locks", "explain", "shop.path", spelled)
        shown = run("celery", "-A", APP, "locks", "show", "shop.path", spelled)
        assert worker.name in shown
    assert key not in run("celery", "-A", APP, "locks", "explain", "shop.path", 'order={"id": 8}')
    send("path", "8", "by_alias")
    record.wait_for(starts=1, job="order 8")
    for job in ("order 7", "order 8"):
        record.let_end(job)
        record.wait_for(ends=1, job=job)


@pytest.mark.parametrize("task", ["all", "template", "callable"])
def test_equal_models_wait_once(task: str, worker_with: Any, send: Any, run: Any, record: Record) -> None:
    first, *others = send(task, "7", *FORMS)
    assert first["was_sent"]
    assert [(each["was_sent"], each["id"]) for each in others] == [(False, first["id"])] * len(others)
    assert [each["was_sent"] for each in send(task, "8", "model")] == [True]
    worker_with(APP, group="beside")
    record.let_end("order 7")
    record.let_end("order 8")
    record.wait_for(ends=1, job="order 7")
    record.wait_for(ends=1, job="order 8")
    until(lambda: not run("celery", "-A", APP, "locks", "list"), "the worker frees what was taken")
    assert send(task, "7", "by_alias")[0]["was_sent"]
    record.wait_for(ends=2, job="order 7")


def test_objects_that_kombu_serializes_are_the_same_at_both_ends(worker_with: Any, send: Any, record: Record) -> None:
    worker: Worker = worker_with(APP, group="beside")
    sent = send("tag", "7", "tagged", "dict")
    until(lambda: worker.log.count("expected: LockConflict") == 1, "the second one is refused")
    assert sent[0]["key"] == sent[1]["key"]
    first, second = send("tag_queued", "7", "tagged", "dict")
    assert (second["was_sent"], second["id"]) == (False, first["id"])
    record.let_end("tag")
    record.wait_for(ends=2)


def test_path_that_leads_nowhere_is_a_clear_error(worker_with: Any, send: Any) -> None:
    worker: Worker = worker_with(APP, group="beside")
    with pytest.raises(AssertionError, match=r"argument order of _work has no 'idd'; it has: "):
        send("wrong", "7", "model")
    until(lambda: "argument order of _work has no 'idd'; it has: " in worker.log, "the task fails with that")
