"""How a process that holds copies of many messages is woken for the locks that they wait for, while none of them takes
a slot.

Protocol: `docs/protocol.md`, section 11.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol


class Place(NamedTuple):
    """A process's first place in the line of a lock.

    Attributes:
        since: when its message first met a conflict, seconds since the epoch.
        limit: how many may hold the lock at once.
    """

    since: float
    limit: int


class Freed(NamedTuple):
    """A lock may be free.

    Attributes:
        key: the lock's key.
        passed_on: how many processes had no use for it before.
        place: nobody is known to have waited longer than the copy with this place; None if any copy may begin.
        places: how many places in the line of the lock are still taken, as far as is known.
    """

    key: str
    passed_on: int = 0
    place: Place | None = None
    places: int = 0


class WakeUps(Protocol):
    """Wakes this process for the locks for which it is in line. Used by one thread.

    Attributes:
        most: the most locks that it can wait for.
    """

    most: int

    def wait(
        self,
        places: Mapping[str, Place],
        interrupt: int,
        copies: Callable[[str], int],
        place_now: Callable[[str], Place | None],
    ) -> Sequence[Freed]:
        """Wait until one of these locks may be free, and nobody is known to have waited longer for it. Return nothing
        now and then, and when there is something to read from the descriptor `interrupt`.

        A lock whose release nobody reports is found free in the end.

        Args:
            places: the first place in the line of each lock.
            interrupt: the descriptor to watch.
            copies: how many copies wait for a lock in this process; asked when its place is taken, and then every few
                seconds.
            place_now: the first place in the line of a lock, once somebody was woken for it: the copy with the place
                in `places` may have begun meanwhile. None if no other copy waits.

        Raises:
            LockUnavailable: no answer, or an error; all places are to be taken anew, which the next call does.
        """

    def pass_on(self, freed: Freed) -> bool:
        """Wake another process, as this one is busy; False if that was done often enough: then take the lock."""

    def give_back(self, key: str) -> None:
        """Wake another process: this one has no copy to begin."""

    def wake_if_free(self, key: str, limit: int) -> None:
        """Wake somebody if fewer than `limit` hold the lock, since maybe nobody was woken; never raises an error."""

    def leave(self) -> None:
        """Leave every line; never raises an error."""
