"""A pipe to one thread of this process, from its other threads and from processes that it starts."""

from __future__ import annotations

import os
from contextlib import suppress
from weakref import finalize


class Pipe:
    """Never waits. Closed when nobody has it any more: the number of a closed descriptor may be reused, and be written
    to.

    Attributes:
        descriptor: the descriptor to watch; readable from a write on, until what was written is read.
        writer: where to write.
    """

    def __init__(self) -> None:
        self.descriptor, self.writer = os.pipe()
        for each in self.descriptor, self.writer:
            os.set_blocking(each, False)
            finalize(self, os.close, each).atexit = False


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
