"""Processes beside the benchmark: fresh Python processes that carry out orders, and real Celery processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

#: Options of a worker that only runs its tasks.
QUIET = ("-l", "WARNING", "--without-gossip", "--without-mingle", "--without-heartbeat")

_spawn = multiprocessing.get_context("spawn")


class Child:
    """A process that runs `target` with a pipe for its orders, and these arguments; killed at the end of `with`."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()

    def ask(self, order: object) -> Any:
        """Send an order, and wait for the answer."""
        self.pipe.send(order)
        return self.pipe.recv()


def cpu_of(pid: int | None) -> float:
    """Seconds of CPU time that a process has used; the kernel counts in steps of 10 ms."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


@contextmanager
def celery(app: str, *arguments: str, log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A running `celery` command for the app in this module. If the caller waits in vain, the error shows its log."""
    command = [sys.executable, "-m", "celery", "-A", app, *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **environment}, start_new_session=True
        )
    try:
        yield process
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{log.read_text(errors='replace')[-3000:]}") from error
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
