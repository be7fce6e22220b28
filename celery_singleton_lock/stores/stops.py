"""How a process hears at once that a run of its own is to stop for a newer task.

It is a hint: a renewal says the same (`Hold.superseded_by`), if later. Protocol: `docs/protocol.md`, section 14.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Stop(NamedTuple):
    """The execution under a hold is to stop.

    Attributes:
        owner: of the hold.
        by: the id of the newer task.
    """

    owner: str
    by: str


class Stops(Protocol):
    """What this process is told. Used by one thread."""

    def wait(self) -> Stop | None:
        """Wait for what comes next, or some seconds: None.

        Raises:
            LockUnavailable: no answer, or an error; the next call connects anew.
        """

    def close(self) -> None:
        """Listen no more; never raises an error."""
