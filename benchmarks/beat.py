"""The cost of an exclusive schedule to beat: sending due entries, and standing by."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from celery.beat import Service
from celery.signals import beat_init
from redis import Redis

from benchmarks import standing_by
from benchmarks.beat_app import QUEUE, make
from benchmarks.measure import OWN, Result, Table, apart, commands, measured
from tests.redis_server import RedisServer

STOCK, OVER_STOCK, REDBEAT = "Celery's Scheduler", f"{OWN}: over Scheduler", "RedBeat"

#: Entries that are due at once.
ONE, MANY = 1, 1_000

#: Seconds between two runs of an entry; and seconds in which all entries must be sent.
INTERVAL, LIMIT = 3600.0, 180.0


@dataclass(frozen=True, slots=True)
class Contestant:
    """A scheduler's name, what keeps the last runs, and its settings."""

    scheduler: str
    keeps: str
    settings: Mapping[str, Any] = field(default_factory=dict)


_ON_STOCK = {"singleton_lock_beat_scheduler": "celery.beat:Scheduler"}

CONTESTANTS: Mapping[str, Contestant] = {
    STOCK: Contestant("celery.beat:Scheduler", "memory"),
    "Celery's PersistentScheduler": Contestant("celery.beat:PersistentScheduler", "file, every 3 min"),
    OVER_STOCK: Contestant("exclusive", "Redis, each run", _ON_STOCK),
    f"{OWN}: over PersistentScheduler": Contestant("exclusive", "Redis, each run; file"),
    REDBEAT: Contestant("redbeat:RedBeatScheduler", "Redis, each run"),
}


def run(*, quick: bool = False) -> Result:
    """Measure sending in this process, with contestants in turns, and standing by in real beats, side by side."""
    rounds, seconds, sizes = (2, 5.0, (MANY,)) if quick else (10, 20.0, (MANY, ONE))
    tables = [_sending(STOCK, CONTESTANTS, size, rounds) for size in sizes]
    notes = [
        f"{rounds} rounds per size. Every entry runs once an hour, all at the same moment; the scheduler is already"
        " running, and knows that moment beforehand. The time is from the first `tick()` to the one that has nothing"
        " more to send, divided by the number of entries.",
        "In each round the broker must have one message per entry, no more and no less.",
        "Broker and locks are on one Redis, on another core than the scheduler; server commands include those within"
        " scripts, and those that send the message.",
        "Celery compares the whole schedule with a copy on each tick, for one message: with 1,000 entries this takes"
        " about half of the time, also under this package. RedBeat sends all due entries in one tick, and has no such"
        " copy.",
        *standing_by.notes(seconds),
    ]
    return Result("beat", "Beat on several hosts", [*tables, standing_by.table(seconds)], notes)


def _sending(baseline: str, contestants: Mapping[str, Contestant], entries: int, rounds: int) -> Table:
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        beats = {
            name: stack.enter_context(_beat(server, database, one, entries))
            for database, (name, one) in enumerate(contestants.items())
        }
        stack.enter_context(apart(server))
        for beat in beats.values():
            beat.turn()
        (sent,) = measured(baseline, rounds, {name: beat.turn for name, beat in beats.items()})
    return sent.table(
        f"A tick of {entries:,} due entries",
        lambda name: {
            "µs per entry": f"{sent.median(name) * 1e6:,.0f}",
            "entries/s": f"{1 / sent.median(name):,.0f}",
            "server commands per entry": f"{beats[name].commands:.2f}",
            "last runs are kept in": contestants[name].keeps,
        },
    )


@contextmanager
def _beat(server: RedisServer, database: int, contestant: Contestant, entries: int) -> Iterator[_Beat]:
    """A beat with its own database and file."""
    with tempfile.TemporaryDirectory() as directory, server.client(database) as client:
        kind = _RedBeat if contestant.scheduler.startswith("redbeat") else _Beat
        beat = kind(server.url_of(database), client, Path(directory) / "schedule", contestant, entries)
        try:
            yield beat
        finally:
            beat.scheduler.close()


class _Beat:
    """What beat's service does, without its sleep; `client` uses the database of the broker and the locks."""

    def __init__(self, url: str, client: Redis, file: Path, contestant: Contestant, entries: int) -> None:
        #: Commands of the server per entry, in the last turn.
        self.commands = 0.0
        #: Seconds from setting the last runs to when all entries are due.
        self._ahead = 1.0
        self._client = client
        self._entries = entries
        self._app = make(url, url, contestant.settings)
        self._app.conf.beat_schedule = {
            f"entry {number}": {"task": "nothing", "schedule": INTERVAL, "args": (number,)} for number in range(entries)
        }
        self._service = Service(self._app, scheduler_cls=contestant.scheduler, schedule_filename=str(file))
        self.scheduler = self._service.scheduler
        self._start()

    def turn(self) -> tuple[float]:
        """Seconds per entry to send all."""
        while not (due_at := self._prepared()):
            self._ahead *= 2
        self._check_sent(0)
        time.sleep(due_at - time.time() + 0.05)
        before, begun = commands(self._client), time.perf_counter()
        self._send()
        passed = time.perf_counter() - begun
        # Two of them were our own INFO and LLEN.
        self.commands = (commands(self._client) - before - 2) / self._entries
        self._check_sent(self._entries)
        return (passed / self._entries,)

    def _prepared(self) -> float:
        """When all entries will be due; 0 if that came before the scheduler knew."""
        self._client.delete(QUEUE)
        due_at = time.time() + self._ahead
        self._set_last_runs(datetime.fromtimestamp(due_at - INTERVAL, tz=timezone.utc))
        self.scheduler.tick()
        return due_at if time.time() < due_at else 0.0

    def _send(self) -> None:
        """Tick until all entries are sent and the scheduler wants to sleep."""
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline:
            if (seconds := self.scheduler.tick()) > 0:
                if self._client.llen(QUEUE) >= self._entries:
                    return
                time.sleep(min(seconds, LIMIT))
        raise TimeoutError(f"the entries were not sent in {LIMIT:g} s")

    def _start(self) -> None:
        """Start the scheduler, up to its loop."""
        self.scheduler.tick()

    def _set_last_runs(self, last: datetime) -> None:
        """Act as if the scheduler had started afresh, with this last run for all entries."""
        for entry in self.scheduler.schedule.values():
            entry.last_run_at = last
        for ledger in self._client.scan_iter("*:ledger"):
            self._client.delete(ledger)  # It would overrule the last runs that are set here.
        self.scheduler.old_schedulers = None  # So the entries are sorted afresh.

    def _check_sent(self, expected: int) -> None:
        """Check that there is exactly one message per entry."""
        messages = [json.loads(message)["headers"]["argsrepr"] for message in self._client.lrange(QUEUE, 0, -1)]
        if not len(messages) == len({*messages}) == expected:
            name = type(self.scheduler).__name__
            raise AssertionError(f"{name}: {len(messages)} messages of {len({*messages})} entries, not {expected}")


class _RedBeat(_Beat):
    """RedBeat has its entries in Redis, and takes its lock when the service announces its start."""

    def _start(self) -> None:
        beat_init.send(sender=self._service)
        if self.scheduler.lock is None:
            raise AssertionError("RedBeat has no lock")
        super()._start()

    def _set_last_runs(self, last: datetime) -> None:
        for name in self._app.conf.beat_schedule:
            key = self.scheduler.Entry.generate_key(self._app, name)
            self.scheduler.Entry.from_key(key, app=self._app).reschedule(last)
