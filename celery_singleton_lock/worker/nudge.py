"""A pipe that wakes a thread from any other wait."""

from __future__ import annotations

import os
from contextlib import suppress

from celery_singleton_lock.worker.pipe import Pipe


class Nudge(Pipe):
    """Wakes the thread that watches its descriptor."""

    def give(self) -> None:
        """Wake the thread; may be called in a signal handler."""
        with suppress(BlockingIOError):  # The pipe is full of nudges.
            os.write(self.writer, b".")

    def take(self) -> None:
        """Take all nudges that were given."""
        with suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
