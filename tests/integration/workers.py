"""Real `celery worker` processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, TypeVar

from celery import Celery
from kombu.exceptions import OperationalError
from redis import Redis
from redis.exceptions import RedisError
from typing_extensions import Self

from tests import programs
from tests.patience import LIMIT, until

P = TypeVar("P", bound="Process")


class Process:
    """A program of Celery's in a process group of its own, which is killed at the end of `with`.

    Args:
        name: of its log file.
        app: the module of its app.
        command: the program, and its arguments.
        directory: where the log is.
        environment: variables beyond those of the tests.
        python: another interpreter than the one of the tests.
    """

    def __init__(
        self,
        name: str,
        app: str,
        command: Sequence[str],
        *,
        directory: Path,
        environment: Mapping[str, str],
        python: str | None = None,
    ) -> None:
        self.name = name
        self._log = directory / f"{name}.log"
        self._log.touch()
        self._log_begins = 0
        self._is_touched = False
        arguments = ["-A", app, *command, "-l", "INFO"]
        self.process = programs.start("celery", arguments, environment=environment, output=self._log, python=python)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def log(self) -> str:
        return self._log.read_bytes()[self._log_begins :].decode(errors="replace")

    def forget_log(self) -> None:
        """Let the log begin here."""
        self._log_begins = self._log.stat().st_size

    @property
    def is_untouched(self) -> bool:
        """Whether it runs and got no signal."""
        return not self._is_touched and self.process.poll() is None

    def kill(self) -> None:
        """Send SIGKILL to it and all its children at once, as if the host had died.

        When this returns, they are gone: until then the broker could give a message to a connection that a child has
        inherited.
        """
        self._signal(signal.SIGKILL)
        self.process.wait()
        until(lambda: not programs.group_of(self.process.pid), f"{self.name} is gone")

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def terminate(self) -> int:
        """Shut it down warmly; returns the exit status."""
        self._is_touched = True
        self.process.terminate()
        try:
            return self.process.wait(LIMIT)
        except TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            self.process.wait(LIMIT)
            raise AssertionError(f"{self.name} does not end:\n{self.log[-10_000:]}") from None

    def _signal(self, number: int) -> None:
        self._is_touched = True
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:  # It has ended, or has just started and does not have its own group yet.
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


class Worker(Process):
    """A `celery worker`."""

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
        python: str | None = None,
    ) -> None:
        self._events = environment["TEST_EVENTS"]
        self._conf = environment.get("TEST_CONF")
        self._hears_later = pool in ("gevent", "eventlet")
        command = ["worker", "-n", f"{name}@test", "-P", pool, "-c", str(concurrency)]
        command += ["--without-mingle", "--without-gossip", *arguments]
        super().__init__(name, app, command, directory=directory, environment=environment, python=python)
        self.name = f"{name}@test"

    def wait_until_ready(self) -> Worker:
        """Wait until the worker reports that it is ready."""
        with Redis.from_url(self._events) as client:
            for _ in range(LIMIT):
                if client.blpop([f"ready:{self.name}"], timeout=1):
                    if self._hears_later:
                        self._wait_until_it_hears()
                    return self
                if self.process.poll() is not None:
                    break
        raise AssertionError(f"{self.name} did not start:\n{self.log[-4000:]}")

    def _wait_until_it_hears(self) -> None:
        """With greenlets, remote control runs in its own greenlet, which starts when the worker is ready."""
        app = Celery(set_as_current=False)
        app.conf.update(json.loads(self._conf or "{}"))
        until(lambda: self._answers(app))

    def _answers(self, app: Celery) -> object:
        # Meanwhile a storm may take the broker away.
        with suppress(OSError, RedisError, OperationalError):
            return app.control.inspect([self.name], limit=1).ping()
        return None


def environment(conf: Mapping[str, Any], *, events: str, record: Path) -> dict[str, str]:
    """The variables that configure a worker's app."""
    return {"TEST_CONF": json.dumps(conf), "TEST_EVENTS": events, "SINGLETON_LOCK_RECORD": str(record)}
