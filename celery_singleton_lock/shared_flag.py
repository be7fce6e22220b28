"""A flag that a process shares with the processes that it starts: each notices once that it was set.

A worker's main process cannot reach into the processes of its pool: a signal would interrupt whatever runs there, and a
pipe would need a thread that reads it. So they share a number, which each process compares when it wakes up anyway.
"""

from __future__ import annotations

import os
from mmap import mmap
from tempfile import TemporaryFile

#: The size of the number in bytes.
_SIZE = 4


class SharedFlag:
    """A number that is shared with each process that is forked afterwards, and with those that get its file.

    Args:
        file: a descriptor of the file of another process's flag.
    """

    def __init__(self, file: int | None = None) -> None:
        self._file = None if file is None else os.fdopen(file, "r+b")
        self._shared = mmap(-1 if file is None else file, _SIZE)
        self._seen = self._shared[:_SIZE]

    def file(self) -> int:
        """A descriptor of the file that has the number from now on; processes that were forked before do not see it."""
        if self._file is None:
            self._file = TemporaryFile()  # noqa: SIM115 - as long as the flag
            self._file.truncate(_SIZE)
            self._shared = mmap(self._file.fileno(), _SIZE)
        return self._file.fileno()

    def set(self) -> None:
        number = int.from_bytes(self._shared[:_SIZE], "big") + 1
        self._shared[:_SIZE] = (number % 256**_SIZE).to_bytes(_SIZE, "big")

    def is_new(self) -> bool:
        """Whether the flag was set since this process last asked; a process that was just started may miss it."""
        number = self._shared[:_SIZE]
        if number == self._seen:
            return False
        self._seen = number
        return True
