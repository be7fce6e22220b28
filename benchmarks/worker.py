"""What a lock costs a real worker, and who sends to it."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.measure import Result, Rounds, Row, Table
from celery_singleton_lock.testing import RedisServer

PLAIN = "plain Task"
CHILDREN = 2

#: Seconds for a worker to start, or to run a batch.
LIMIT = 180.0


def run(*, quick: bool = False) -> Result:
    """All take turns in the same worker, a batch each."""
    rounds, batch = (4, 150) if quick else (14, 400)
    with tempfile.TemporaryDirectory() as directory, RedisServer() as server:
        file = Path(directory) / "ran"
        file.touch()
        os.environ.update({"BENCHMARK_BROKER": server.url, "BENCHMARK_FILE": str(file)})
        with _worker(Path(directory) / "log"):
            running, sending = _measure(file, rounds, batch)
    notes = [
        f"One prefork worker of {CHILDREN} processes, broker and locks on one Redis, bodies that only write the time.",
        f"{rounds} rounds of {batch} messages per contestant, each with an argument of its own, all queued before the"
        " worker takes the first.",
        "A task's time is that from the first to the last body, divided by their number; results are not kept.",
        "celery-singleton and celery-once lock when a task is sent, the others when it runs.",
    ]
    return Result("worker", "Tasks in a worker", [running, sending], notes)


def _measure(file: Path, rounds: int, batch: int) -> tuple[Table, Table]:
    from benchmarks.worker_app import TASKS  # With the broker that is known only now.

    numbers = count()
    sent_in: dict[str, list[float]] = {name: [] for name in TASKS}

    def turn(name: str) -> float:
        published_in, ran_in = _batch(file, TASKS[name], batch, numbers)
        sent_in[name].append(published_in)
        return ran_in

    _control("cancel_consumer")
    for task in TASKS.values():
        _batch(file, task, 20, numbers)
    running = Rounds(PLAIN).run(rounds, {name: lambda name=name: turn(name) for name in TASKS})
    sending = Rounds(PLAIN).adopt(sent_in)
    return (
        _table("Running a task that does nothing", "tasks/s", running),
        _table("Sending a task (delay)", "calls/s", sending),
    )


def _table(title: str, unit: str, measured: Rounds) -> Table:
    rows = [Row(name, measured.ratio(name), {unit: f"{1 / measured.median(name):,.0f}"}) for name in measured.figures]
    return Table(title, PLAIN, rows)


def _batch(file: Path, task: Any, size: int, numbers: Iterator[int]) -> tuple[float, float]:
    """Seconds per message to send it, and to run it."""
    os.truncate(file, 0)
    begun = time.perf_counter()
    for _ in range(size):
        task.delay(next(numbers))
    sent_in = time.perf_counter() - begun
    _control("add_consumer")
    deadline = time.monotonic() + LIMIT
    while file.stat().st_size < 8 * size:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{task.name}: {file.stat().st_size // 8} of {size} tasks ran in {LIMIT:g} s")
        time.sleep(0.02)
    _control("cancel_consumer")
    ran_at = sorted(at for (at,) in struct.iter_unpack("d", file.read_bytes()))
    return sent_in / size, (ran_at[-1] - ran_at[0]) / (size - 1)


def _control(order: str) -> None:
    """Have the worker take messages from the queue, or stop to; return when it does."""
    from benchmarks.worker_app import QUEUE, app

    deadline = time.monotonic() + LIMIT
    while not app.control.broadcast(order, {"queue": QUEUE}, reply=True, limit=1, timeout=2):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the worker does not answer to {order}")


@contextmanager
def _worker(log: Path) -> Iterator[None]:
    """A worker; should it not answer, its log tells why."""
    command = [sys.executable, "-m", "celery", "-A", "benchmarks.worker_app", "worker", "-P", "prefork"]
    command += ["-c", str(CHILDREN), "-l", "WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{log.read_text(errors='replace')[-3000:]}") from error
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
