"""A pipe that wakes a thread from any other wait."""

from __future__ import annotations

import os
from contextlib import suppress
from weakref import finalize


class Nudge:
    """Closed when nobody has it any more: the number of a closed descriptor may be reused, and be written to.

    Attributes:
        descriptor: the descriptor to watch; readable from a nudge on, until the nudge is taken.
    """

    def __init__(self) -> None:
        self.descriptor, self._writer = os.pipe()
        for each in self.descriptor, self._writer:
            os.set_blocking(each, False)
            finalize(self, os.close, each).atexit = False

    def give(self) -> None:
        """Wake the thread; may be called in a signal handler."""
        with suppress(BlockingIOError):  # The pipe is full of nudges.
            os.write(self._writer, b".")

    def take(self) -> None:
        """Take all nudges that were given."""
        with suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
