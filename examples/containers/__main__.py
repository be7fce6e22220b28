"""Brings up docker-compose.yml, kills a beat and the worker at work, and judges what ran.

    python -m examples.containers [rabbitmq] [redlock]

also uses the files of these names in docker/. Takes everything down at the end; the exit status is 1 if a tick ran
twice or was lost, or two reports ran at the same time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from redis import Redis

from celery_singleton_lock import clock
from examples.containers import TTL
from examples.containers.record import SENT, Run, overlaps, read

ROOT = Path(__file__).parents[2]

APP = "examples.containers.tasks"

#: Seconds for all containers to become healthy, once the image is built.
START_LIMIT = 180

#: Seconds for the others to go on after a kill: until a lease ends, or until a message is delivered again.
LIMIT = 60.0

#: Ticks to wait for before the first kill, and after each.
TICKS = 6


class Project:
    """The containers of the compose file, under their own project name."""

    def __init__(self, overrides: Sequence[str]) -> None:
        files = [ROOT / "docker-compose.yml", *(ROOT / "docker" / f"{name}.yml" for name in overrides)]
        names = [argument for file in files for argument in ("--file", str(file))]
        project = f"singleton-lock-demo-{os.getpid()}"
        self._command = ["docker", "compose", "--progress", "quiet", "--project-name", project, *names]
        # Any free port: the usual one may be taken.
        self._environment = {**os.environ, "REDIS_PORT": "0"}
        self._service_of: dict[str, str] = {}

    def __enter__(self) -> Project:
        return self

    def __exit__(self, *_: object) -> None:
        self.run("down", "--volumes", "--timeout", "1")

    def up(self) -> None:
        """Build, start, and wait until all are healthy."""
        try:
            self.run("up", "--detach", "--wait", "--wait-timeout", str(START_LIMIT))
        except subprocess.CalledProcessError:
            self.run("ps", "--all")
            self.run("logs", "--tail", "50")
            raise SystemExit("the containers did not become healthy") from None
        for service in self.ask("ps", "--services").split():
            self._service_of[self.ask("ps", "--quiet", service)[:12]] = service

    def run(self, *arguments: str) -> None:
        """Run a command of compose; only its errors are printed."""
        subprocess.run([*self._command, *arguments], env=self._environment, check=True)

    def ask(self, *arguments: str) -> str:
        """Run a command of compose, and return its output."""
        command = [*self._command, *arguments]
        done = subprocess.run(command, env=self._environment, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.strip()

    def record(self) -> Redis:
        """The Redis to which the tasks write their record, through the port that is open on this host."""
        host, _, port = self.ask("port", "redis", "6379").rpartition(":")
        return Redis(host=host, port=int(port), db=2, decode_responses=True)

    def service_of(self, node: str) -> str:
        """The service of the container whose id a node's name ends with: Docker names hosts after container ids."""
        return self._service_of[node.partition("@")[2]]

    def beat(self) -> str:
        """A beat that runs."""
        lines = self.ask("exec", "-T", "worker-one", "celery", "--app", APP, "locks", "list", "--json").splitlines()
        locks = [json.loads(line) for line in lines]
        return self.service_of(next(lock["node"] for lock in locks if lock["name"].startswith("beat:")))


@dataclass(frozen=True)
class Kill:
    """The kill of a service, and when another had taken over; seconds on the clock of the record."""

    service: str
    at: float
    over: float


def main(overrides: Sequence[str]) -> int:
    if shutil.which("docker") is None:
        print("no docker here: install Docker with compose v2, or try `make demo`, which needs none")
        return 1
    with Project(overrides) as project:
        print("building the image, starting Redis, two workers and two beats ...", flush=True)
        project.up()
        with project.record() as record:
            good = judged(project, record)
        if not good:
            project.run("logs", "--no-color", "--tail", "200")
    return 0 if good else 1


def judged(project: Project, record: Redis) -> bool:
    """Run the storm, and return whether all went well."""
    try:
        kills = storm(project, record)
        sent: Any = record.smembers(SENT)
        # The messages that the killed worker had taken are delivered again.
        until(lambda: not lost(read(record), sent), "all ticks that were sent")
    except TimeoutError as error:
        print(error)
        return False
    return judge(read(record), sent, kills)


def storm(project: Project, record: Redis) -> tuple[Kill, Kill]:
    """Kill a beat, and then the busy worker."""
    more(record, "tick", TICKS)
    running = project.beat()
    print(f"{running} runs: kill it", flush=True)
    beat = kill(project, record, running, "tick")
    more(record, "tick", TICKS)

    # One that has just begun, so that it is killed in the middle.
    more(record, "report", 1)
    report = [run for run in read(record) if run.job == "report"][-1]
    worker = project.service_of(report.worker)
    print(f"{worker} is at work: kill it", flush=True)
    both = beat, kill(project, record, worker, "report")
    more(record, "tick", TICKS)
    return both


def kill(project: Project, record: Redis, service: str, job: str) -> Kill:
    """Kill a service, wait until the others do its job, and start it again."""

    def next_run() -> Run | None:
        """The first run that was due when nothing from the killed service was under way any more."""
        return next((run for run in read(record) if run.job == job and due(run) > gone), None)

    at = now(record)
    project.run("kill", service)
    gone = now(record)
    following = until(next_run, f"the next {job}")
    project.run("start", service)
    return Kill(service, at, following.began)


def more(record: Redis, job: str, count: int) -> None:
    """Wait for `count` more runs of a job."""
    seen = sum(run.job == job for run in read(record))
    until(lambda: sum(run.job == job for run in read(record)) >= seen + count, f"{count} more runs of {job}")


def now(record: Redis) -> float:
    """The time on the clock of the record, in seconds."""
    seconds, microseconds = record.time()
    return float(seconds) + float(microseconds) / 1e6


def due(run: Run) -> float:
    """When a run was due, in seconds since the epoch."""
    return datetime.fromisoformat(run.due).timestamp()


def lost(runs: Sequence[Run], sent: set[str]) -> set[str]:
    """The ids of ticks that were sent, but have not run."""
    return sent - {run.task_id for run in runs if run.outcome == "done"}


def judge(runs: Sequence[Run], sent: set[str], kills: Sequence[Kill]) -> bool:
    """Print what ran, and return whether it is as promised."""
    # A run that was killed and its repetition count once.
    ticks = [run.due for run in runs if run.job == "tick" and run.outcome == "done"]
    reports, workers = [run for run in runs if run.job == "report"], {run.worker for run in runs}
    twice, missing, both = len(ticks) - len(set(ticks)), lost(runs, sent), overlaps(runs)
    print(f"tick, every second:   ran {len(ticks)} times on {len(workers)} workers; {twice} twice, {len(missing)} lost")
    print(f"report, takes longer: ran {len(reports)} times; {len(both)} pairs at the same time")
    for killed, job in zip(kills, ("tick", "report"), strict=True):
        print(f"{killed.service} killed: the next {job} began {killed.over - killed.at:.1f} s later (ttl {TTL:g} s)")
    good = bool(sent) and not twice and not missing and not both and len(workers) == 2
    print("as promised: once per tick, never twice at the same time" if good else "NOT as promised")
    return good


T = TypeVar("T")


def until(true: Callable[[], T | None], what: str) -> T:
    """Wait until `true` returns something true, and return that."""
    deadline = clock.now() + LIMIT
    while not (found := true()):
        if clock.now() > deadline:
            raise TimeoutError(f"waited {LIMIT:g} s in vain for {what}")
        clock.sleep(0.1)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
