"""How a process that has the copies of many messages is woken for the locks that these wait for, with none of them in a
slot.

Protocol: `docs/protocol.md`, section 11.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol


class Place(NamedTuple):
    """The first place in the line of a lock that a process has.

    Attributes:
        since: when its message met a conflict first, seconds since the epoch.
        limit: how many may hold the lock at once.
    """

    since: float
    limit: int


class Freed(NamedTuple):
    """A lock may be free.

    Attributes:
        key: of the lock.
        passed_on: how many processes had no use for it before.
    """

    key: str
    passed_on: int = 0


class WakeUps(Protocol):
    """Wakes this process for the locks for which it is in line. Used by one thread.

    Attributes:
        most: for how many locks at most.
    """

    most: int

    def wait(self, places: Mapping[str, Place], interrupt: int, copies: Callable[[str], int]) -> Sequence[Freed]:
        """Wait until one of these locks may be free, for which nobody is known to have waited for longer; or return
        nothing now and then, and when there is something to read from the descriptor `interrupt`.

        A lock of which nobody says that it was freed is found free in the end.

        Args:
            places: the first place in the line of each lock.
            interrupt: a descriptor.
            copies: how many copies wait for a lock in this process; asked when its place is taken, and then every few
                seconds.

        Raises:
            LockUnavailable: no answer, or an error; all places are to be taken anew, which the next call does.
        """

    def pass_on(self, freed: Freed) -> bool:
        """Wake another process, as this one is busy; False where that was done often enough, and it is to be taken."""

    def give_back(self, key: str) -> None:
        """Wake another process: this one has nothing to begin with."""

    def wake_if_free(self, key: str, limit: int) -> None:
        """Wake somebody, as nobody may have been, if fewer than `limit` hold the lock; raises no error."""

    def leave(self) -> None:
        """Leave every line; never raises an error."""
