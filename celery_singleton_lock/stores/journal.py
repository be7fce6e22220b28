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
        overlaps: for each entry, a run of the same key at the same time; None if there is none, as it should be.
    """

    now: float
    in_a_row: Sequence[int]
    overlaps: Sequence[Entry | None]


#: The most counts of a journal whose names come from messages.
MAX_LABELS = 500


class Journal(Protocol):
    """What became of the copies of all messages, and how often. With several nodes, each has a part.

    All methods raise `LockUnavailable` if there is no answer, or an error; what `write` was given may then be written.
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
            slack: seconds by which these may be wrong: a shorter overlap does not count.
            coarse: counts of which only the `MAX_LABELS` that grew last are kept, each with the count that it is added
                to when it is dropped.
        """

    def counts(self) -> dict[str, int]:
        """All counts."""

    def entries(self, *, since: float) -> Iterator[Entry]:
        """The entries since then, in the order of writing; seconds since the epoch, by the server's clock."""

    def refused(self) -> dict[str, int]:
        """How many copies were refused in a row, by the key of the lock."""
