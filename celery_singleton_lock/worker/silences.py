"""A pipe through which the processes of a pool report that the lock server does not answer.

A report is a line: the key about which it did not answer, and the reason, as JSON.
"""

from __future__ import annotations

import json
import os
import select
from contextlib import suppress

from celery_singleton_lock import cleaned
from celery_singleton_lock.worker.pipe import Pipe

#: The most bytes of a report: up to this, a write is all or nothing (POSIX guarantees 512, Linux 4096).
MAX_SIZE = min(getattr(select, "PIPE_BUF", 512), 4096)

#: More than a pipe holds, so that a read ends with a whole report.
_ALL = 1 << 20


def report(writer: int, key: str, reason: str) -> None:
    """In a process of the pool; never waits."""
    line = json.dumps([cleaned.text(key, most=cleaned.MAX_KEY_BYTES), cleaned.text(reason)]).encode() + b"\n"
    if len(line) <= MAX_SIZE:
        with suppress(OSError):  # The pipe is full of reports; or the main process is gone.
            os.write(writer, line)


class Silences(Pipe):
    """Reports of questions without an answer; made before the pool starts its processes."""

    def latest(self) -> tuple[str, str] | None:
        """In the main process: take all reports; the key and reason of the last, None if there was none."""
        with suppress(BlockingIOError):
            fields = cleaned.array(os.read(self.descriptor, _ALL).splitlines()[-1])
            if fields is not None and len(fields) == 2:  # The user's code has the pipe, too.
                return cleaned.key(fields[0]), cleaned.text(fields[1])
        return None
