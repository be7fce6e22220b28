"""What every attempt, worker and fault writes down: a line each, appended in one go, on the clock of the machine."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from celery_singleton_lock import clock
from tests.appended import append

#: Name the file, and the host that a process takes its own for.
HISTORY, HOST = "STORM_HISTORY", "STORM_HOST"

_runs = itertools.count()


def write(event: str, **fields: object) -> None:
    line = {"at": clock.now(), "host": os.environ.get(HOST, ""), "pid": os.getpid(), "event": event, **fields}
    append(Path(os.environ[HISTORY]), line)


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
