"""The history of a rehearsal: a file to which every process appends lines, and the runs that they show.

The lines are about the body of the task, not about its lock: the lock is not a witness in its own case.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

#: How a body ended: by itself, with its own exception, with a retry, or because this package or Celery stopped it.
DONE, RAISED, RETRIED, STOPPED = "done", "raised", "retried", "stopped"


class Line(NamedTuple):
    """One line of the history.

    Attributes:
        what: a worker is `ready`; a message `met` a process; it was `refused`; its body `began`, and `ended`; it
            `failed` for good, or `succeeded`.
        at: when, on this host's steady clock.
        pid: where it happened.
        task_id, retries: the message, and its attempt.
        run: a name of the run, the same in its two lines.
        about: the conflict's policy, or how a body ended.
        key, fence: the key and fence of a run's lock.
    """

    what: str
    at: float
    pid: int
    task_id: str = ""
    retries: int = 0
    run: str = ""
    about: str = ""
    key: str = ""
    fence: int = 0


class Run(NamedTuple):
    """A body that ran.

    Attributes:
        began: the line about its beginning.
        ended: the line about its end; None if it has not come; after a SIGKILL, it never does.
    """

    began: Line
    ended: Line | None


def append(path: Path, line: Line) -> None:
    """Write a line with one system call, so that lines of several processes do not mix."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def read(path: Path) -> list[Line]:
    """The complete lines so far."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [Line(*json.loads(text)) for text in whole.splitlines()]


def runs(lines: Iterable[Line]) -> list[Run]:
    """The runs, in the order in which they began."""
    lines = list(lines)
    ends = {line.run: line for line in lines if line.what == "ended"}
    began = sorted((line for line in lines if line.what == "began"), key=lambda line: line.at)
    return [Run(line, ends.get(line.run)) for line in began]


def overlaps(ran: Sequence[Run], limit: int, cut: Mapping[str, float]) -> int:
    """How many runs began while as many as the limit allows, or more, were running.

    Args:
        ran: the runs, in the order in which they began.
        limit: the limit of the lock.
        cut: when runs were killed, by name; from then on they do not count as running.
    """

    def end(run: Run) -> float:
        return run.ended.at if run.ended else cut.get(run.began.run, float("inf"))

    before = (sum(end(other) > run.began.at for other in ran[:number]) for number, run in enumerate(ran))
    return sum(running >= limit for running in before)


def fences_grow(ran: Iterable[Run]) -> bool:
    """Whether, of any two runs under one lock, the later has the higher fencing token."""
    last: dict[str, int] = {}
    for line in (run.began for run in ran):
        if line.fence <= last.get(line.key, 0):
            return False
        last[line.key] = line.fence
    return True
