"""What beat has sent, where all beats see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a tick is not this beat's to send.

    Attributes:
        last: it was sent, and this is the entry's last run now; None if somebody else is about to send it.
        remaining: seconds until the other claim ends.
    """

    last: int | None
    remaining: float


#: Seconds for which a ledger knows the last run of an entry that is gone, when a claim is made: another beat, with the
#: schedule of a moment before, may only now ask for a tick that was sent.
MEMORY = 300.0


class Ledger(Protocol):
    """What beat has sent: the last run of each entry of a schedule, in microseconds since the epoch.

    Every call may be repeated, and may have been carried out for some of the entries when it raises. Each takes a
    `ceiling`: nothing later than that is believed, but taken for what a wrong clock has left. All raise
    `LockUnavailable` if there is no answer, or an error.
    """

    def align(self, lasts: Mapping[str, int], *, ceiling: int) -> dict[str, int]:
        """The last run of each entry, which is what is given here for those of which nothing is known.

        It is known from then on, unless it is 0. Entries that are not given are forgotten: one that comes back begins
        anew, but a claim for what was sent of it is refused for `MEMORY`.
        """

    def lasts(self) -> dict[str, int]:
        """The last run of each entry of which something is known; for people, and changes nothing."""

    def claim(self, lasts: Mapping[str, int], owner: str, *, ttl: float, ceiling: int) -> dict[str, Refused]:
        """Ask to send the tick of each entry that follows its last run; which of them are refused.

        Args:
            lasts: the last runs from which the ticks follow.
            owner: whose claim it is; it may claim again.
            ttl: seconds after which somebody else may send it, unless it was recorded as sent.
            ceiling: see above.
        """

    def record(self, lasts: Mapping[str, int], owner: str, *, ceiling: int) -> None:
        """Say which is the last run of each entry now; 0 for one that was claimed and not sent."""

    def unclaim(self, entries: Sequence[str], owner: str) -> None:
        """End what this owner has claimed of some entries, for good: a claim of its that comes later is none.

        For a claim that was not answered, since it may be carried out at any time.
        """

    def secret(self) -> str:
        """A text that is known only with access to the lock server; made when it is first asked for.

        It is the same for all who ask at different times, until the server loses it. Two that ask at the same time for
        one that is just being made may be told different ones by a Redlock, and are told the same when they ask again.
        """
