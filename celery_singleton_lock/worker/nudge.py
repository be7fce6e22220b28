"""A pipe that wakes a thread from any other wait."""

from __future__ import annotations

import os
from contextlib import suppress
from weakref import finalize


class Nudge:
    """Closed when nobody has it any more: a number that was closed may be another's, which is then written to.

    Attributes:
        descriptor: to be watched; readable from a nudge on, until that is taken.
    """

    def __init__(self) -> None:
        self.descriptor, self._writer = os.pipe()
        for each in self.descriptor, self._writer:
            os.set_blocking(each, False)
            finalize(self, os.close, each).atexit = False

    def give(self) -> None:
        """Also in a signal's handler."""
        with suppress(BlockingIOError):  # It is full of what says the same.
            os.write(self._writer, b".")

    def take(self) -> None:
        """All that were given."""
        with suppress(BlockingIOError):
            os.read(self.descriptor, 4096)
