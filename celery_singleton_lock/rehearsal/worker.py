"""A `celery worker` that a rehearsal starts in a separate process group, and may kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

#: The seconds that a worker has to end by itself.
ENDS_IN = 60.0


class Worker:
    """A worker process with its children; it is ended with the `with` block, by force if need be.

    Args:
        name: its node name.
        queue: the only queue from which it takes messages.
        options: the options of `celery` that name the app.
        pool, concurrency: as for `celery worker`.
        environment: additions to the environment of the process.
        log: the file for its output.
    """

    def __init__(
        self,
        name: str,
        queue: str,
        *,
        options: Sequence[str],
        pool: str,
        concurrency: int,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self.name, self.queue, self._log = name, queue, log
        command = [sys.executable, "-m", "celery", *options, "worker", "-n", name, "-Q", queue, "-P", pool]
        command += ["-c", str(concurrency), "-I", "celery_singleton_lock.rehearsal.witness", "-l", "INFO"]
        command += ["--without-mingle", "--without-gossip", "--without-heartbeat"]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut_down()
        try:
            self._process.wait(ENDS_IN)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def last_words(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-2000:]

    def stop(self) -> None:
        """Freeze the worker and its children."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def shut_down(self) -> None:
        """Ask the worker to end when its tasks have ended."""
        self._process.terminate()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
