"""What a lock costs a real worker, and who sends to it."""

from __future__ import annotations

import os
import struct
import tempfile
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.measure import Result, Table, measured, wait_until
from benchmarks.processes import QUIET, celery
from celery_singleton_lock.testing import RedisServer

PLAIN, CHILDREN = "plain Task", 2

#: Seconds for a worker to start, or to run a batch.
LIMIT = 180.0


def run(*, quick: bool = False) -> Result:
    """All take turns in the same worker, a batch each."""
    rounds, batch = (4, 150) if quick else (14, 400)
    with tempfile.TemporaryDirectory() as directory, RedisServer() as server:
        file = Path(directory) / "ran"
        file.touch()
        os.environ.update({"BENCHMARK_BROKER": server.url, "BENCHMARK_FILE": str(file)})
        options = ("-P", "prefork", "-c", str(CHILDREN), *QUIET)
        with celery("benchmarks.worker_app", "worker", *options, log=Path(directory) / "log", environment={}):
            tables = _measure(file, rounds, batch)
    notes = [
        f"One prefork worker of {CHILDREN} processes, broker and locks on one Redis, bodies that only write the time.",
        f"{rounds} rounds of {batch} messages per contestant, each with an argument of its own, all queued before the"
        " worker takes the first.",
        "A task's time is that from the first to the last body, divided by their number; results are not kept.",
        "celery-singleton and celery-once lock when a task is sent, the others when it runs.",
    ]
    return Result("worker", "Tasks in a worker", tables, notes)


def _measure(file: Path, rounds: int, size: int) -> list[Table]:
    from benchmarks.worker_app import TASKS  # With the broker that is known only now.

    numbers = count()

    def batch(name: str, size: int) -> tuple[float, float]:
        """Seconds per message to send it, and to run it."""
        os.truncate(file, 0)
        begun = time.perf_counter()
        for _ in range(size):
            TASKS[name].delay(next(numbers))
        sent = time.perf_counter() - begun
        _order("add_consumer")
        wait_until(lambda: file.stat().st_size >= 8 * size, LIMIT, f"{name}: {size} tasks have not run")
        _order("cancel_consumer")
        ran_at = sorted(at for (at,) in struct.iter_unpack("d", file.read_bytes()))
        return sent / size, (ran_at[-1] - ran_at[0]) / (size - 1)

    _order("cancel_consumer")
    for name in TASKS:
        batch(name, 20)
    sending, running = measured(PLAIN, rounds, {name: partial(batch, name, size) for name in TASKS})
    return [
        running.table("Running a task that does nothing", lambda name: {"tasks/s": f"{1 / running.median(name):,.0f}"}),
        sending.table("Sending a task (delay)", lambda name: {"calls/s": f"{1 / sending.median(name):,.0f}"}),
    ]


def _order(order: str) -> None:
    """Have the worker take messages from the queue, or stop to; return when it does."""
    from benchmarks.worker_app import QUEUE, app

    def obeyed() -> Any:
        return app.control.broadcast(order, {"queue": QUEUE}, reply=True, limit=1, timeout=2)

    wait_until(obeyed, LIMIT, f"the worker does not answer to {order}")
