"""What every attempt, worker and fault writes down: a line each, appended in one go, on the clock of the machine."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery_singleton_lock import clock

#: Name the file, and the host that a process takes its own for.
HISTORY, HOST = "STORM_HISTORY", "STORM_HOST"

_runs = itertools.count()


def write(event: str, **fields: object) -> None:
    line = {"at": clock.now(), "host": os.environ.get(HOST, ""), "pid": os.getpid(), "event": event, **fields}
    append(Path(os.environ[HISTORY]), line)


def append(path: Path, line: dict[str, object]) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


@contextmanager
def attempt(key: str, message: str, **fields: object) -> Iterator[Callable[[], None]]:
    """Write down that a body runs, and how it ends; what is yielded is called while it does."""
    run = f"{os.getpid()}-{next(_runs)}-{clock.now():.3f}"
    write("start", run=run, key=key, message=message, **fields)
    how = "stopped"
    try:
        yield lambda: write("beat", run=run)
        how = "done"
    except Exception:
        how = "raised"
        raise
    finally:
        write("end", run=run, how=how)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
