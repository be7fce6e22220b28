"""The journal: the history of all copies of messages, where every process can read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from celery_singleton_lock.journal_entry import Entry

#: The most keys of which a journal knows how often in a row a copy was refused; with more, it starts afresh.
KEYS_REMEMBERED = 10_000


class Journal(Protocol):
    """What became of the copies of all messages, and how often. With several nodes, each has a part.

    All methods raise `LockUnavailable` if there is no answer, or an error; what `write` was given may then be written.
    """

    def write(self, counts: Mapping[str, int], entries: Sequence[Entry], *, now: float) -> Sequence[int]:
        """Add to the counts, and to the entries, of which the oldest are forgotten.

        Args:
            counts: by how much each has grown; its names are the caller's.
            entries: what to add.
            now: the present on the clock of their times; readers get them on the server's.

        Returns:
            For each entry, how many copies were refused since a run ended under the key; 0 for other entries.
        """

    def counts(self) -> dict[str, int]:
        """All counts."""

    def entries(self, *, since: float) -> Iterator[Entry]:
        """The entries since then, in the order of writing; seconds since the epoch, by the server's clock."""

    def refused(self) -> dict[str, int]:
        """How many copies were refused in a row, by the key of the lock."""
