"""A pipe through which the processes of a pool report that the lock server does not answer."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from weakref import finalize

#: The most bytes of a report: up to this, a write is all or nothing (POSIX guarantees 512, Linux 4096).
MAX_SIZE = min(select.PIPE_BUF, 4096)

#: More than a pipe holds, so that a read ends with a whole report.
_ALL = 1 << 20


class Silences:
    """Reports of keys about which there was no answer; made before the pool forks.

    Attributes:
        descriptor: the descriptor to watch; readable from a report on, until the reports are taken.
    """

    def __init__(self) -> None:
        self.descriptor, self._writer = os.pipe()
        for each in self.descriptor, self._writer:
            os.set_blocking(each, False)
            finalize(self, os.close, each).atexit = False

    def report(self, key: str) -> None:
        """In a process of the pool; never waits."""
        line = key.encode(errors="replace") + b"\n"
        if len(line) <= MAX_SIZE:
            with suppress(OSError):  # The pipe is full of reports; or the main process is gone.
                os.write(self._writer, line)

    def latest(self) -> str | None:
        """In the main process: take all reports; the last key, None if there was no report."""
        with suppress(BlockingIOError):
            return os.read(self.descriptor, _ALL).decode(errors="replace").splitlines()[-1]
        return None
