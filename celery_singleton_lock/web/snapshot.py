"""Everything that the pages show, as it was at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.journal.counts import Count
from celery_singleton_lock.journal_entry import Entry


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The locks of an app at one moment.

    Attributes:
        prefix: of their keys.
        at: when that was, in seconds since the epoch, by this host's clock.
        locks: those that are held, in order.
        counts: how often what happened.
        refused: how many copies were refused in a row, by the key of the lock.
        entries: what became of the last copies, the oldest first.
        lasts: the last run of each entry of beat's schedule, in microseconds since the epoch.
        error: why the lock server could not be asked. What is here was true at `at`; nothing is known of later.
        tried_at: when it was asked last, by the clock of `at`.
    """

    prefix: str
    at: float = 0.0
    locks: Sequence[HeldLock] = ()
    counts: Mapping[Count, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    entries: Sequence[Entry] = ()
    lasts: Mapping[str, int] = field(default_factory=dict)
    error: str = ""
    tried_at: float = 0.0

    @property
    def now(self) -> float:
        """The moment up to which the journal is known: its clock is the lock server's, which may be ahead."""
        return max(self.at, max((entry.ended for entry in self.entries[-100:]), default=0.0))
