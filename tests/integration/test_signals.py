"""Each message ends with one of Celery's signals, whether it has run or not: what a monitor needs to know of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import celery
import pytest
from celery import Celery
from celery.result import AsyncResult

from tests.integration.workers import Worker, environment
from tests.patience import until
from tests.recording import Record
from tests.redis_server import RedisServer


class Studio:
    """A worker, and what its signals said about each message."""

    def __init__(self, server: RedisServer, directory: Path, pool: str) -> None:
        conf = {
            "broker_url": server.url_of(0),
            "result_backend": server.url_of(1),
            "singleton_lock_backend": server.url_of(2),
            "singleton_lock_ttl": 2.0,
        }
        self.record = Record(directory / "record")
        self.app = Celery(set_as_current=False)
        self.app.conf.update(conf)
        variables = environment(conf, events=server.url_of(3), record=self.record.path)
        app = "tests.integration.signals_app"
        self.worker = Worker("one", directory=directory, environment=variables, app=app, pool=pool, concurrency=4)

    def send(self, task: str, *args: object, **options: object) -> AsyncResult:
        return self.app.send_task(task, args, **options)

    def signals(self) -> dict[str, list[str]]:
        found: defaultdict[str, list[str]] = defaultdict(list)
        for run in self.record.runs():
            if run.job.startswith("signal "):
                found[run.task_id].append(run.job.removeprefix("signal "))
        return found


@pytest.fixture(params=["prefork", "threads"])
def studio(own_redis: RedisServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Studio]:
    made = Studio(own_redis, tmp_path, request.param)
    with made.worker:
        made.worker.wait_until_ready()
        yield made
        if request.session.testsfailed:
            print(f"---- {made.worker.name}\n{made.worker.log[-6000:]}", dict(made.signals()))


def test_each_end_has_one_signal(studio: Studio) -> None:
    leader = studio.send("skip", "report")
    studio.record.wait_for(starts=1)
    expected = {leader.id: ["success"]}
    studio.send("skip", "report", task_id=leader.id)
    for task, ends in [
        ("skip", ["revoked"]),
        ("raise", ["failure"]),
        ("reject", ["failure"] if celery.VERSION[:2] >= (5, 7) else []),
        ("join", ["success"]),
        ("retry", ["success"]),
    ]:
        expected[studio.send(task, "report").id] = ends
    expected[studio.send("retry", "report", expires=1).id] = ["revoked expired"]
    of_two = [studio.send("rerun", "report").id for _ in range(2)]  # The newest is the one that comes last.
    expected[studio.send("retried", "other").id] = ["retry", "success"]
    failing = studio.send("skip", "bill", True)
    until(lambda: studio.record.runs("bill"))
    follows = studio.send("join", "bill", True)
    expected |= {failing.id: ["failure"], follows.id: ["failure"]}
    stopped = studio.send("replace", "build")
    until(lambda: studio.record.runs("build"))
    expected |= {stopped.id: ["revoked"], studio.send("replace", "build").id: ["success"]}
    until(lambda: "revoked" in studio.signals()[stopped.id])
    studio.record.let_end("build")
    until(lambda: "revoked expired" in [it for each in studio.signals().values() for it in each])
    studio.record.let_end("report")
    studio.record.let_end("bill")

    def fit() -> bool:
        found = studio.signals()
        both = sorted(found.pop(task_id, []) for task_id in of_two)
        return (both, found) == ([["revoked"], ["success"]], {it: ends for it, ends in expected.items() if ends})

    until(fit)
    assert all(AsyncResult(task_id, app=studio.app).ready() for task_id in (*expected, *of_two))
