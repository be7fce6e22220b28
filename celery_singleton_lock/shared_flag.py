"""A flag that a process shares with all processes that it has forked: each notices once that it was set.

A worker's main process cannot reach into the processes of its pool: a signal would interrupt whatever runs there, and a
pipe would need a thread that reads it. So they share a number, which each process compares when it wakes up anyway.
"""

from __future__ import annotations

from mmap import mmap

#: The size of the number in bytes.
_SIZE = 4


class SharedFlag:
    """A number that is shared with each process that is forked afterwards."""

    def __init__(self) -> None:
        self._shared = mmap(-1, _SIZE)
        self._seen = self._shared[:_SIZE]

    def set(self) -> None:
        number = int.from_bytes(self._shared[:_SIZE], "big") + 1
        self._shared[:_SIZE] = (number % 256**_SIZE).to_bytes(_SIZE, "big")

    def is_new(self) -> bool:
        """Whether the flag was set since this process last asked; a process that was just forked may miss it."""
        number = self._shared[:_SIZE]
        if number == self._seen:
            return False
        self._seen = number
        return True
