"""Which task ran when: written by the tasks of the tests, on one clock, and checked for overlaps in one place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from celery_singleton_lock import clock
from tests.appended import append, read
from tests.patience import LIMIT

#: Names the file that tasks write their runs to.
VARIABLE = "SINGLETON_LOCK_RECORD"


@dataclass(frozen=True)
class Run:
    job: str
    task_id: str
    pid: int
    start: float
    #: Infinite for a run that never completed.
    end: float = float("inf")
    outcome: str = "open"
    fence: int = 0


@contextmanager
def run(job: str, task_id: str, fence: int = 0) -> Iterator[None]:
    """Record the block as a run of `job`. It may be stopped at any line, also in this function."""
    outcome = "aborted"
    try:
        write(event="start", job=job, task_id=task_id, fence=fence)
        yield
        outcome = "done"
    except Exception:
        outcome = "raised"
        raise
    finally:
        _certainly(event=outcome, job=job, task_id=task_id)


def mark(job: str, task_id: str) -> None:
    """Record that something happened."""
    write(event="mark", job=job, task_id=task_id)


def _certainly(**fields: object) -> None:
    """Write it even if that is interrupted; perhaps twice."""
    try:
        write(**fields)
    except BaseException:
        write(**fields)
        raise


def write(**fields: object) -> None:
    """Write one line with the present time."""
    append(os.environ[VARIABLE], {"at": clock.now(), "pid": os.getpid(), **fields})


def may_end(job: str) -> bool:
    """Whether a test has allowed it, see `Record.let_end`."""
    return os.path.exists(_ending(os.environ[VARIABLE], job))


def _ending(record: str, job: str) -> str:
    return f"{record}.{job}.may-end"


class Record:
    """The runs recorded in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def runs(self, job: str | None = None, *, killed_at: float = float("inf")) -> list[Run]:
        """The runs in the order of their starts; those without an end ended at `killed_at`."""
        found: list[Run] = []
        open_runs: dict[tuple[str, int], int] = {}
        for event in read(self.path):
            place = (event["task_id"], event["pid"])
            if event["event"] == "start":
                open_runs[place] = len(found)
                found.append(Run(event["job"], *place, event["at"], end=killed_at, fence=event["fence"]))
            elif event["event"] == "mark":
                found.append(Run(event["job"], *place, event["at"], end=event["at"], outcome="done"))
            else:
                index = open_runs.pop(place, None)
                if index is not None:  # It was neither stopped before its start was written nor written twice.
                    found[index] = replace(found[index], end=event["at"], outcome=event["event"])
        return sorted((run for run in found if job in (None, run.job)), key=lambda run: run.start)

    def let_end(self, job: str) -> None:
        """End the present and future runs of a job that take as long as a test wants."""
        Path(_ending(str(self.path), job)).touch()

    def wait_for(self, *, starts: int = 0, ends: int = 0, job: str | None = None) -> list[Run]:
        """The runs, once that many have started and ended. The only place in the tests that polls the record."""
        deadline = clock.now() + LIMIT
        while True:
            runs = self.runs(job)
            if len(runs) >= starts and sum(run.outcome != "open" for run in runs) >= ends:
                return runs
            assert clock.now() < deadline, f"waited {LIMIT:g} s for {starts} starts and {ends} ends; saw {runs}"
            clock.sleep(0.01)


def overlaps(runs: list[Run]) -> list[tuple[Run, Run]]:
    """Pairs of runs of one job where one started before the other had ended."""
    found = []
    for job in {run.job for run in runs}:
        of_job = sorted((run for run in runs if run.job == job), key=lambda run: run.start)
        for index, first in enumerate(of_job):
            found += [(first, second) for second in of_job[index + 1 :] if second.start < first.end]
    return found
