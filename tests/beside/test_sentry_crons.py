"""Sentry's monitoring of beat's schedule: each check-in that is opened is closed, however its tick ends."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import appended
from tests.beside.conftest import conf_of
from tests.beside.environments import python_of
from tests.integration import workers
from tests.patience import until
from tests.recording import Record
from tests.redis_server import RedisServer

pytestmark = pytest.mark.slow

APP = "tests.beside.apps.monitored"


class Monitored:
    """Beats and a worker, and what they told Sentry."""

    def __init__(self, server: RedisServer, directory: Path, group: str, exits: ExitStack) -> None:
        self.server, self.directory, self.group, self.exits = server, directory, group, exits
        self.file = directory / "check-ins"
        self.file.touch()
        self.beats: list[workers.Process] = []
        self.variables = {"TEST_CHECK_INS": str(self.file)}

    def start_beats(self, *names: str) -> None:
        conf = conf_of(self.server, singleton_lock_beat_ttl=10.0)
        for name in names:
            self.beats.append(
                self.exits.enter_context(
                    workers.Process(
                        name,
                        APP,
                        ["beat", "-S", "exclusive", "-s", str(self.directory / f"{name}.schedule"), "--pidfile="],
                        directory=self.directory,
                        environment={
                            **workers.environment(conf, events="", record=self.directory / "record"),
                            **self.variables,
                        },
                        python=python_of(self.group),
                    )
                )
            )

    def check_ins(self) -> dict[str, dict[str, list[str]]]:
        """The statuses of each check-in, in order, by monitor and id."""
        found: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
        for line in appended.read(self.file):
            found[line["monitor_slug"]].setdefault(line["check_in_id"], []).append(line["status"])
        return found


@pytest.fixture(params=["beside", "beside-older"])
def monitored(redis_server: RedisServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Monitored]:
    with ExitStack() as exits:
        made = Monitored(redis_server, tmp_path, request.param, exits)
        yield made
        if request.session.testsfailed:
            for beat in made.beats:
                print(f"---- {beat.name}\n{beat.log[-3000:]}")


def test_each_check_in_is_closed(
    monitored: Monitored, worker_with: Callable[..., workers.Worker], record: Record
) -> None:
    ends = {"skip": "ok", "rerun": "ok", "raise": "error", "reject": "error", "late": "error"}
    monitored.variables["TEST_SCHEDULE"] = json.dumps([*ends])
    worker_with(APP, group=monitored.group, environment=monitored.variables, concurrency=8)
    monitored.start_beats("one", "two")
    until(
        lambda: all(
            sum(it[1:] == [end] for it in monitored.check_ins()[task].values()) >= 2 for task, end in ends.items()
        )
    )
    for beat in monitored.beats:
        assert beat.terminate() == 0
    for task in ends:
        record.let_end(task)
    until(lambda: all(len(it) == 2 for of_task in monitored.check_ins().values() for it in of_task.values()))
    for task, found in monitored.check_ins().items():
        closed = [statuses[1] for statuses in found.values()]
        assert {statuses[0] for statuses in found.values()} == {"in_progress"}
        assert {*closed} <= {"ok", ends[task]}
        assert "ok" in closed, "its run"


def test_tick_is_announced_by_the_beat_that_sends_it(monitored: Monitored) -> None:
    monitored.variables["TEST_SCHEDULE"] = json.dumps(["skip"])
    monitored.start_beats("one", "two", "three")
    until(lambda: len(monitored.check_ins()["skip"]) >= 5)
    for beat in monitored.beats:
        assert beat.terminate() == 0
    with monitored.server.client(0) as client:
        assert client.llen("celery") == len(monitored.check_ins()["skip"])
