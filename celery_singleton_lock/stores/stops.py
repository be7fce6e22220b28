"""How a process learns at once that one of its runs is to stop for a newer task.

This is a hint: a renewal reports the same, later (`Hold.superseded_by`). Protocol: `docs/protocol.md`, section 14.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Stop(NamedTuple):
    """The execution under a hold is to stop.

    Attributes:
        owner: the hold's owner.
        by: the id of the newer task.
    """

    owner: str
    by: str


class Stops(Protocol):
    """The stops that this process is notified of. Used by one thread."""

    def wait(self) -> Stop | None:
        """Wait for the next stop, or for some seconds; None if there was none.

        Raises:
            LockUnavailable: no answer, or an error; the next call connects anew.
        """

    def close(self) -> None:
        """Stop listening; never raises an error."""
