"""What happened to the copies of all messages, where every process can read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from celery_singleton_lock.journal_entry import Entry


@dataclass(frozen=True, slots=True)
class Written:
    """What the journal knew as it was written to.

    Attributes:
        now: the server's time, seconds since the epoch.
        in_a_row: for each entry, how many copies were refused since a run ended under the key; 0 for other entries.
        overlaps: for each entry, a run of the same key at the same time; None is as it should be.
    """

    now: float
    in_a_row: Sequence[int]
    overlaps: Sequence[Entry | None]


#: Counts of a journal whose names come from messages.
MAX_LABELS = 500


class Journal(Protocol):
    """What became of the copies of all messages, and how often. Of several nodes each has a part.

    All raise `LockUnavailable` if there is no answer, or an error; what `write` was given may have been written then.
    """

    def write(
        self,
        counts: Mapping[str, int],
        entries: Sequence[Entry],
        *,
        slack: float,
        coarse: Mapping[str, str] | None = None,
    ) -> Written:
        """Add to the counts, and to the entries, of which the oldest are forgotten.

        Args:
            counts: by how much each has grown; its names are the caller's.
            entries: their times are the server's.
            slack: seconds by which these may be wrong: runs that overlap by less are none that do.
            coarse: the counts of which `MAX_LABELS` are kept, those that grew last, and for each the count to which it
                is added when it is given up.
        """

    def counts(self) -> dict[str, int]:
        """All counts."""

    def entries(self, *, since: float) -> Iterator[Entry]:
        """The entries since then, as they were written; seconds since the epoch, on the server's clock."""

    def refused(self) -> dict[str, int]:
        """How many copies were refused in a row, by the key of the lock."""
