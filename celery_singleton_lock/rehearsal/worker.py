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
        queue: the only queue from which it takes messages, and its name.
        options: those of `celery` that name the app, and more for `celery worker`.
        environment: additions to the environment of the process.
        log: the file for its output.
    """

    def __init__(
        self, queue: str, *, options: tuple[Sequence[str], Sequence[str]], environment: Mapping[str, str], log: Path
    ) -> None:
        self.queue, self._log = queue, log
        before, after = options
        command = [sys.executable, "-m", "celery", *before, "worker", "-n", f"{queue}@rehearsal", "-Q", queue, *after]
        command += ["-I", "celery_singleton_lock.rehearsal.witness", "-l", "INFO"]
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
            self.kill()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def last_words(self) -> str:
        """The end of its log."""
        return self._log.read_text(errors="replace")[-2000:]

    def shut_down(self) -> None:
        """Ask the worker to end when its tasks have ended."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the worker and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
