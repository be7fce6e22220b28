"""Real `celery worker` processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from redis import Redis

ROOT = Path(__file__).parents[2]

#: Seconds for a worker to start or to stop.
LIMIT = 60


class Worker:
    """A `celery worker` in a process group of its own, which is killed at the end of `with`."""

    def __init__(
        self,
        name: str,
        *,
        directory: Path,
        environment: Mapping[str, str],
        pool: str = "prefork",
        concurrency: int = 2,
        app: str = "tests.integration.app",
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.name = f"{name}@test"
        self._log = directory / f"{name}.log"
        self._events = environment["TEST_EVENTS"]
        command = [sys.executable, "-m", "celery", "-A", app, "worker", "-n", self.name, "-P", pool]
        command += ["-c", str(concurrency), "-l", "INFO", "--without-mingle", "--without-gossip", *arguments]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_ready(self) -> Worker:
        """Wait for the worker to say that it is."""
        with Redis.from_url(self._events) as client:
            for _ in range(LIMIT):
                if client.blpop([f"ready:{self.name}"], timeout=1):
                    return self
                if self.process.poll() is not None:
                    break
        raise AssertionError(f"{self.name} did not start:\n{self.log[-4000:]}")

    def kill(self) -> None:
        """SIGKILL to the worker and all its children at once, as when the host goes."""
        self._signal(signal.SIGKILL)
        self.process.wait()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def terminate(self) -> int:
        """Warm shutdown; the exit status."""
        self.process.terminate()
        return self.process.wait(LIMIT)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def environment(conf: Mapping[str, Any], *, events: str, record: Path) -> dict[str, str]:
    """What a worker's app is set up by."""
    return {"TEST_CONF": json.dumps(conf), "TEST_EVENTS": events, "SINGLETON_LOCK_RECORD": str(record)}
