"""The lines that every attempt, worker and fault writes, each appended in one go, with the clock of the machine."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from celery_singleton_lock import clock
from tests.appended import append

#: Variables that name the file, and the host of a process.
HISTORY, HOST = "STORM_HISTORY", "STORM_HOST"

_runs = itertools.count()


def write(event: str, **fields: object) -> None:
    if file := os.environ[HISTORY]:  # A soak has none.
        line = {"at": clock.now(), "host": os.environ.get(HOST, ""), "pid": os.getpid(), "event": event, **fields}
        append(file, line)


@contextmanager
def attempt(key: str, message: str, **fields: object) -> Iterator[Callable[[], None]]:
    """Write that a body runs, and how it ends; call the yielded function while it runs."""
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
