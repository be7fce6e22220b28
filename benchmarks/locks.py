"""What a lock looks like to the benchmarks, whoever made it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

#: Seconds that every lock here is good for.
TTL = 30.0


class Lock(Protocol):
    """One lock object, used for one acquire and one release, as in a `with` block."""

    def acquire(self, wait: float) -> bool:
        """Take it, waiting for up to `wait` seconds; 0: try once."""

    def release(self) -> None:
        """Free it."""


#: Makes a new lock of this name, on connections that stay open.
Maker = Callable[[str], Lock]

#: From the URLs of the servers (one, or several for a Redlock).
Opener = Callable[[Sequence[str]], Maker]
