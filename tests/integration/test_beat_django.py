"""Beats with a schedule in Django's database: real beats, a real database, real kills."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from celery_singleton_lock import clock
from tests import programs
from tests.integration.beats import Beat, Message, pause_between_ticks
from tests.integration.conftest import until
from tests.integration.workers import Worker
from tests.patience import LIMIT
from tests.recording import Record
from tests.redis_server import RedisServer

PROJECT = "tests.integration.django_project"

#: Seconds of a claim in these tests.
TTL = 2

#: Seconds by which two computations of the same time may differ.
JITTER = 0.001


@dataclass
class Site:
    """A broker that also keeps the locks, a database, and beats."""

    server: RedisServer
    directory: Path
    exits: ExitStack
    settings: dict[str, Any] = field(default_factory=dict)
    beats: list[Beat] = field(default_factory=list)
    #: Seconds that the last query of the database took.
    took: float = 0.0

    @property
    def environment(self) -> dict[str, str]:
        settings = {
            "CELERY_BROKER_URL": self.server.url_of(0),
            "CELERY_SINGLETON_LOCK_BACKEND": self.server.url_of(2),
            "CELERY_SINGLETON_LOCK_BEAT_TTL": TTL,
            **self.settings,
        }
        return {
            "TEST_DATABASE": str(self.directory / "database"),
            "TEST_SETTINGS": json.dumps(settings),
            "TEST_EVENTS": self.server.url_of(3),
            "SINGLETON_LOCK_RECORD": str(self.directory / "record"),
        }

    def orm(self, action: str, **fields: Any) -> dict[str, dict[str, Any]]:
        """Add, change or show entries; returns all of them, by name."""
        began = clock.now()
        done = programs.run(f"{PROJECT}.orm", [action], environment=self.environment, given=json.dumps(fields))
        assert done.returncode == 0, done.stderr
        self.took = clock.now() - began
        rows: dict[str, dict[str, Any]] = json.loads(done.stdout)
        return rows

    def row(self, entry: str) -> dict[str, Any]:
        """The row of an entry in the database."""
        return self.orm("show")[entry]

    def start(self, *names: str) -> list[Beat]:
        """Start beats with these names, one by one."""
        started = []
        for name in names:
            command = ["beat", "-S", "exclusive", "--pidfile", ""]
            app = f"{PROJECT}.celery"
            beat = Beat(name, command, directory=self.directory, environment=self.environment, app=app)
            self.exits.callback(beat.kill)
            self.beats.append(beat)
            started.append(beat.wait_for("beat: Starting"))
        return started

    def sent(self, entry: str) -> list[Message]:
        """The messages in the queue, in the order in which they were sent."""
        with self.server.client(0) as client:
            headers = [json.loads(raw)["headers"] for raw in reversed(client.lrange("celery", 0, -1))]
        return [
            Message(entry, it["id"], datetime.fromisoformat(it["singleton_lock"]["due"]).timestamp())
            for it in headers
            if it["periodic_task_name"] == entry
        ]

    def wait_for_sent(self, entry: str, number: int = 1) -> list[Message]:
        """Wait until that many more messages were sent."""
        wanted = len(self.sent(entry)) + number
        until(lambda: len(self.sent(entry)) >= wanted)
        return self.sent(entry)

    def is_recorded(self, entry: str) -> bool:
        """Whether something was sent, and all beats know the last send."""
        sent = self.sent(entry)
        return bool(sent) and self.ledger().get(entry, 0) >= sent[-1].due - JITTER

    def wait_until_recorded(self, entry: str, seconds: float = LIMIT) -> list[Message]:
        until(lambda: self.is_recorded(entry), seconds=seconds)
        return self.sent(entry)

    def kill_between_ticks(self, beat: Beat, entry: str) -> None:
        """Kill it between two ticks: killed between a send and its record, it leaves a message to be sent twice."""
        pause_between_ticks(beat, self.server, lambda: self.is_recorded(entry))
        beat.kill()

    def ledger(self) -> dict[str, float]:
        """The last runs that all beats share, including those of entries that have just been deleted."""
        with self.server.client(2) as client:
            lasts = {key.split(":gone:")[1].removesuffix(":"): client.get(key) for key in client.keys("*:gone:*")}
            for key in client.keys("*:ledger"):
                lasts |= client.hgetall(key)
        return {entry: int(last) / 1_000_000 for entry, last in lasts.items()}


@pytest.fixture(scope="module")
def migrated(tmp_path_factory: pytest.TempPathFactory, lasting_redis: RedisServer) -> Path:
    """A database with its tables but no entries."""
    with ExitStack() as exits:
        site = Site(lasting_redis, tmp_path_factory.mktemp("migrated"), exits)
        assert site.orm("migrate") == {}
        return site.directory / "database"


@pytest.fixture
def site(own_redis: RedisServer, migrated: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    shutil.copy(migrated, tmp_path)
    with ExitStack() as exits:
        made = Site(own_redis, tmp_path, exits)
        yield made
        if request.session.testsfailed:
            for beat in made.beats:
                print(f"---- {beat.name}\n{beat.log[-3000:]}")


def spacings(messages: list[Message]) -> list[float]:
    """Seconds from one due time to the next."""
    return [after.due - before.due for before, after in itertools.pairwise(messages)]


def check_distinct(messages: list[Message]) -> None:
    """Check that no tick was sent twice, by its id or its due time."""
    assert len({message.task_id for message in messages}) == len(messages)
    assert all(spacing > 2 * JITTER for spacing in spacings(messages)), messages


def seen_by_all(site: Site) -> None:
    """Wait until the beats have seen the change: they look before each tick, so "clock" has to go on."""
    site.wait_for_sent("clock", 3)


@pytest.mark.slow
def test_each_tick_is_sent_once_while_beats_are_killed(site: Site) -> None:
    site.orm("add", name="clock", every=1)
    first, second, _ = site.start("first", "second", "third")
    site.wait_for_sent("clock", 4)
    site.kill_between_ticks(first, "clock")
    site.wait_for_sent("clock", 4)
    site.kill_between_ticks(second, "clock")
    site.wait_for_sent("clock", 4)
    _, *sent = site.sent("clock")  # The first message makes up for what was due before there was a beat.
    check_distinct(sent)
    assert spacings(sent) == pytest.approx([1] * (len(sent) - 1), abs=JITTER)


@pytest.mark.slow
def test_edits_are_honoured(site: Site) -> None:
    site.orm("add", name="clock", every=1)
    site.orm("add", name="edited", every=1)
    site.start("first", "second")
    site.wait_for_sent("edited", 2)

    site.orm("change", name="edited", every=3600)
    seen_by_all(site)
    before = site.sent("edited")
    site.wait_for_sent("clock", 3)
    assert site.sent("edited") == before

    site.orm("change", name="edited", every=2)
    edited = site.wait_for_sent("edited", 4)
    assert spacings(edited[-3:]) == pytest.approx([2, 2], abs=JITTER)

    site.orm("change", name="edited", enabled=False)
    seen_by_all(site)
    before = site.sent("edited")
    site.wait_for_sent("clock", 5)
    assert site.sent("edited") == before

    enabled_at = clock.wall()
    site.orm("change", name="edited", enabled=True)
    again = site.wait_for_sent("edited", 3)[len(before) :]
    assert again[0].due > enabled_at + 2
    assert spacings(again) == pytest.approx([2] * (len(again) - 1), abs=JITTER)

    site.orm("add", name="new", every=1)
    new = site.wait_for_sent("new", 3)
    assert spacings(new)[-1:] == pytest.approx([1], abs=JITTER)
    for entry in ("clock", "edited", "new"):
        check_distinct(site.sent(entry))


def soon(seconds: float) -> float:
    return round(clock.wall() + seconds, 3)


#: How a beat may end: with its state written to the database, and without.
ENDS = pytest.mark.parametrize("end", [Beat.terminate, Beat.kill], ids=["stopped", "killed"])


@ENDS
@pytest.mark.slow
def test_clocked_entry_is_sent_once(site: Site, end: Any) -> None:
    site.orm("add", name="clock", every=1)
    (first,) = site.start("first")
    site.wait_for_sent("clock")  # This tick writes to the database; the next write is three minutes away.
    when = soon(8)
    site.orm("add", name="one", clocked=when, one_off=True)
    (sent,) = site.wait_until_recorded("one")
    assert sent.due == pytest.approx(when, abs=JITTER)
    assert site.row("one")["total_run_count"] == 0
    end(first)
    site.start("second")
    until(lambda: not site.row("one")["enabled"])
    site.wait_for_sent("clock", 3)
    assert site.sent("one") == [sent]
    check_distinct(site.sent("clock"))


def test_worker_runs_what_is_due(site: Site) -> None:
    site.orm("add", name="clock", every=1)
    record = Record(site.directory / "record")
    first, _ = site.start("first", "second")
    with Worker("runner", directory=site.directory, environment=site.environment, app=f"{PROJECT}.celery") as worker:
        record.wait_for(ends=3)
        first.kill()
        runs = record.wait_for(ends=len(record.runs()) + 3)
        assert worker.terminate() == 0
    assert {run.outcome for run in runs} == {"done"}
    assert len({run.task_id for run in runs}) == len(runs)
