"""A minute in which everything happens to some beats of any scheduler, and what ran meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from celery_singleton_lock import clock
from tests import appended
from tests.integration.beats import APP, Beat, Studio, studio
from tests.integration.workers import Worker
from tests.redis_server import RedisServer

SCHEDULE: dict[str, Any] = {"one": 1.0, "half": 0.5, "cron": "crontab"}

#: Seconds of the lease; RedBeat's lock lasts as long.
TTL = 3.0

#: Seconds until a beat that ended is restarted, as by a supervisor.
RESTART = 1.0

#: Seconds for which a beat is paused: by then, its claims have ended.
PAUSE = 2 * TTL

#: Seconds between two events: by then, everything has settled.
EVERY = 8.0

#: The beat that has sent last is killed three times, paused and resumed twice, and shut down twice; the lock server
#: restarts once.
EVENTS = ("kill", "pause", "end", "kill", "restart", "pause", "end", "kill")


@dataclass(frozen=True)
class Run:
    entry: str
    task_id: str
    due: float | None
    at: float


@dataclass
class Outcome:
    """What happened in a minute."""

    runs: list[Run] = field(default_factory=list)
    #: When something was done to the beat that had sent last, and when another one had begun to send.
    windows: list[tuple[str, float, float]] = field(default_factory=list)
    #: Beats that ended by themselves.
    died: int = 0
    began: float = 0.0
    ended: float = 0.0

    def of(self, entry: str) -> list[Run]:
        return sorted((run for run in self.runs if run.entry == entry), key=lambda run: run.at)

    def twice(self, entry: str) -> int:
        """Runs that came less than half an interval after another run of the entry."""
        every = 60.0 if SCHEDULE[entry] == "crontab" else SCHEDULE[entry]
        times = [run.due or run.at for run in self.of(entry)]
        times.sort()
        return sum(later - earlier < every / 2 for earlier, later in itertools.pairwise(times))

    def gaps(self, entry: str) -> list[tuple[float, float]]:
        """Pairs of times between which ticks are missing."""
        every = 60.0 if SCHEDULE[entry] == "crontab" else SCHEDULE[entry]
        times = [self.began, *sorted(run.due or run.at for run in self.of(entry)), self.ended]
        return [(earlier, later) for earlier, later in itertools.pairwise(times) if later - earlier > 1.6 * every]

    def missing(self, entry: str) -> int:
        """Missing ticks, in intervals that were not restarted."""
        every = 60.0 if SCHEDULE[entry] == "crontab" else SCHEDULE[entry]
        return sum(round((later - earlier) / every) - 1 for earlier, later in self.gaps(entry))

    def unexplained(self, entry: str) -> list[tuple[float, float]]:
        """Gaps that nothing explains that was done."""
        return [
            gap
            for gap in self.gaps(entry)
            if not any(begin - 1.5 <= gap[0] and gap[1] <= end + 1.5 for _, begin, end in self.windows)
        ]


class Storm:
    """Some beats that are kept running, and what happens to them."""

    def __init__(self, made: Studio, command: Callable[[str], tuple[str, ...]], count: int) -> None:
        self._studio = made
        self._command = command
        self._starts = 0
        self.outcome = Outcome()
        self._beats = [self._start() for _ in range(count)]

    def run(self) -> Outcome:
        """Do everything, one after another."""
        self.outcome.began = clock.wall()
        for event in EVENTS:
            self._rest(EVERY)
            self._do(event)
        self._rest(EVERY)
        self.outcome.ended = clock.wall()
        return self.outcome

    def _do(self, event: str) -> None:
        latest, before = self._latest(), clock.wall()
        sent = sum(beat.log.count("Sending due") for beat in self._beats if beat is not latest)
        if event == "restart":
            self._studio.locks.restart()
            self._rest(PAUSE)
        elif event == "pause":
            latest.pause()
            self._rest(PAUSE)
            latest.resume()
        else:
            if event == "kill":
                latest.kill()
            else:
                latest.terminate()
            self._wait_for_another(latest, sent)
            self._beats.remove(latest)
            clock.sleep(RESTART)
            self._beats.append(self._start())
        self.outcome.windows.append((event, before, clock.wall()))

    def _wait_for_another(self, latest: Beat, sent: int) -> None:
        """Wait until another beat has sent something, or for the length of two leases."""
        deadline = clock.now() + 2 * TTL
        others = [beat for beat in self._beats if beat is not latest]
        while clock.now() < deadline and sum(beat.log.count("Sending due") for beat in others) == sent:
            clock.sleep(0.05)

    def _latest(self) -> Beat:
        """The beat that has sent last."""
        return max(self._beats, key=lambda beat: _last_sent(beat.log))

    def _rest(self, seconds: float) -> None:
        """Wait; meanwhile, restart what has ended by itself."""
        deadline = clock.now() + seconds
        while clock.now() < deadline:
            for beat in [beat for beat in self._beats if beat.process.poll() is not None]:
                self.outcome.died += 1
                self._beats.remove(beat)
                clock.sleep(RESTART)
                self._beats.append(self._start())
            clock.sleep(0.1)

    def _start(self) -> Beat:
        self._starts += 1
        name = f"beat{self._starts}"
        directory = self._studio.directory
        beat = Beat(name, list(self._command(name)), directory=directory, environment=self._studio.environment())
        self._studio.exits.callback(beat.kill)
        return beat.wait_for("beat: Starting")


@contextmanager
def storm(directory: Path, command: Callable[[str], tuple[str, ...]], count: int, **conf: Any) -> Iterator[Storm]:
    """Beats that `command` starts, a worker, and their own servers."""
    persistent = ["--appendonly", "yes", "--appendfsync", "always"]
    with RedisServer() as broker, RedisServer(persistent) as locks, studio(broker, locks, directory) as made:
        made.schedule = SCHEDULE
        made.conf = {"singleton_lock_beat_ttl": TTL, **conf}
        worker = Worker("runner", directory=directory, environment=made.environment(), app=APP)
        made.exits.enter_context(worker)
        yield Storm(made, command, count)


def weather(directory: Path, command: Callable[[str], tuple[str, ...]], count: int, **conf: Any) -> Outcome:
    """The outcome of a whole storm."""
    with storm(directory, command, count, **conf) as raging:
        outcome = raging.run()
        for line in appended.read(directory / "runs"):
            due = line["due"] and datetime.fromisoformat(line["due"]).timestamp()
            outcome.runs.append(Run(line["entry"], line["task_id"], due, line["at"]))
    outcome.runs = [run for run in outcome.runs if outcome.began <= run.at]
    return outcome


def _last_sent(log: str) -> str:
    """The time in the last line about a send."""
    lines = [line for line in log.splitlines() if "Sending due" in line]
    return lines[-1][:25] if lines else ""
