"""The ledger of what beat has sent, where all beats see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Refused:
    """Why this beat must not send a tick.

    Attributes:
        last: the entry's last run now, if the tick was sent; None if somebody else is about to send it.
        remaining: seconds until the other claim ends.
        claimer: whose claim it is; empty if that is not known.
    """

    last: int | None
    remaining: float
    claimer: str = ""


#: Seconds for which a ledger still knows the last run of a removed entry: another beat, with the previous schedule, may
#: only now ask for a tick that was sent.
MEMORY = 300.0


class Ledger(Protocol):
    """What beat has sent: the last run of each entry of a schedule, in microseconds since the epoch.

    Every call may be repeated, and may have been carried out for some of the entries when it raises. Each takes a
    `ceiling`: a later time is not believed, but taken for what a wrong clock has left. All methods raise
    `LockUnavailable` if there is no answer, or an error.
    """

    def align(self, lasts: Mapping[str, int], *, ceiling: int) -> dict[str, int]:
        """The last run of each entry; for an entry that is not known yet, the one that is given here.

        That one is known from then on, unless it is 0. Entries that are not given are forgotten: an entry that comes
        back begins anew, but no tick of it that was sent is sent again, for `MEMORY`.
        """

    def lasts(self) -> dict[str, int]:
        """The last run of each known entry; for people, and changes nothing."""

    def claim(self, entry: str, last: int, owner: str, *, ttl: float, ceiling: int) -> Refused | str:
        """Ask to send the tick of an entry that follows its last run.

        Args:
            entry: its name.
            last: the last run from which the tick follows.
            owner: whose claim it is; it may claim again.
            ttl: seconds after which somebody else may send it, unless it was recorded as sent.
            ceiling: see above.

        Returns:
            Why it is refused; or a secret, a text that is known only with access to the lock server, and made with the
            first claim. It is the same for all claims, until the server loses it; then that of the next to claim
            becomes the secret, if there is any left. Two that claim at the same time on a Redlock, while it is being
            made, may get different ones, and get the same when they claim again.
        """

    def record(self, lasts: Mapping[str, int], owner: str, *, ceiling: int) -> None:
        """Record the last run of each entry; 0 for an entry that was claimed and not sent."""

    def unclaim(self, entries: Sequence[str], owner: str) -> None:
        """End this owner's claims for some entries, for good: its late claims do not count.

        For a claim that was not answered, since it may be carried out at any time.
        """
