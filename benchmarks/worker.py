"""The cost of a lock to a real worker, and to its senders."""

from __future__ import annotations

import os
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import Result, Table, measured, wait_until
from benchmarks.processes import QUIET, celery, cpu_of
from tests.redis_server import RedisServer

PLAIN, TRIPS, CHILDREN = "plain Task", "two PINGs in the task", 2

#: The processes whose CPU time a task takes.
_PLACES = "main process", "children", "server"

#: Seconds for a worker to start, or to run a batch.
LIMIT = 180.0


def run(*, quick: bool = False) -> Result:
    """Measure all contestants in turns in the same worker, a batch each."""
    rounds, batch = (4, 150) if quick else (14, 400)
    with tempfile.TemporaryDirectory() as directory, RedisServer() as server:
        file = Path(directory) / "ran"
        file.touch()
        os.environ.update({"BENCHMARK_BROKER": server.url, "BENCHMARK_FILE": str(file)})
        options = ("-P", "prefork", "-c", str(CHILDREN), *QUIET)
        with celery("benchmarks.worker_app", "worker", *options, log=Path(directory) / "log", environment={}) as worker:
            tables = _measure(file, rounds, batch, partial(_used, worker.pid, server.pid))
    notes = [
        f"One prefork worker of {CHILDREN} processes, broker and locks on one Redis, bodies that only write the time.",
        f"{rounds} rounds of {batch} messages per contestant, each with a different argument, all queued before the"
        " worker takes the first.",
        "A task's time is the time from the first to the last body, divided by their number; results are not kept.",
        f'"{TRIPS}" locks nothing: it shows what the two round trips of a lock cost by themselves.',
        "CPU time is that of the worker's main process, its children and the server, from before the worker takes the"
        " first message until the last body has run; the kernel counts in steps of 10 ms.",
        "celery-singleton and celery-once lock when a task is sent, the others when it runs.",
    ]
    return Result("worker", "Tasks in a worker", tables, notes)


def _measure(file: Path, rounds: int, size: int, used: Callable[[], Sequence[float]]) -> list[Table]:
    from benchmarks.worker_app import TASKS  # Imported only now, when the broker is known.

    numbers = count()

    def batch(name: str, size: int) -> Sequence[float]:
        """Seconds per message to send it, and to run it; then CPU seconds, in all and of each process."""
        os.truncate(file, 0)
        begun = time.perf_counter()
        for _ in range(size):
            TASKS[name].delay(next(numbers))
        sent = time.perf_counter() - begun
        before = used()
        _order("add_consumer")
        wait_until(lambda: file.stat().st_size >= 8 * size, LIMIT, f"{name}: {size} tasks have not run")
        cpu = [(now - then) / size for now, then in zip(used(), before, strict=True)]
        _order("cancel_consumer")
        ran_at = sorted(at for (at,) in struct.iter_unpack("d", file.read_bytes()))
        return sent / size, (ran_at[-1] - ran_at[0]) / (size - 1), sum(cpu), *cpu

    _order("cancel_consumer")
    for name in TASKS:
        batch(name, 20)
    turns = {name: partial(batch, name, size) for name in TASKS}
    sending, running, cpu, *each = measured(PLAIN, rounds, turns)

    def cpu_columns(name: str) -> dict[str, str]:
        return {f"µs, {who}": f"{its.median(name) * 1e6:.0f}" for who, its in zip(_PLACES, each, strict=True)}

    return [
        running.table("Running a task that does nothing", lambda name: {"tasks/s": f"{1 / running.median(name):,.0f}"}),
        cpu.table("CPU time for that", cpu_columns),
        sending.table("Sending a task (delay)", lambda name: {"calls/s": f"{1 / sending.median(name):,.0f}"}),
    ]


def _used(worker: int, server: int | None) -> Sequence[float]:
    """Seconds of CPU time that each of `_PLACES` has used so far."""
    children = [child.pid for child in psutil.Process(worker).children()]
    return cpu_of(worker), sum(map(cpu_of, children)), cpu_of(server)


def _order(order: str) -> None:
    """Make the worker take messages from the queue, or stop doing so; return when it has obeyed."""
    from benchmarks.worker_app import QUEUE, app

    def obeyed() -> Any:
        return app.control.broadcast(order, {"queue": QUEUE}, reply=True, limit=1, timeout=2)

    wait_until(obeyed, LIMIT, f"the worker does not answer to {order}")
