"""Everything that the pages show, at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from celery_singleton_lock import cleaned
from celery_singleton_lock.diagnosis.held import HeldLock
from celery_singleton_lock.journal.counts import Count
from celery_singleton_lock.journal_entry import Entry

#: Where a hold is: its key, its slot, and its owner token.
Place = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The locks of an app at one moment.

    Attributes:
        prefix: the prefix of their keys.
        at: the moment, in seconds since the epoch, by this host's clock.
        locks: the held locks, in order.
        ends: when each lock ends unless it is renewed, in seconds since the epoch, by `place_of`; without locks that
            never end.
        counts: the counts of the journal.
        refused: how many copies were refused in a row, by the key of the lock.
        entries: what happened to the last copies, the oldest first.
        lasts: the last run of each entry of beat's schedule, in microseconds since the epoch.
        error: why the lock server could not be asked. The data was true at `at`; nothing is known of later times.
        tried_at: when the lock server was last asked, by the same clock as `at`.
    """

    prefix: str
    at: float = 0.0
    locks: Sequence[HeldLock] = ()
    ends: Mapping[Place, float] = field(default_factory=dict)
    counts: Mapping[Count, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    entries: Sequence[Entry] = ()
    lasts: Mapping[str, int] = field(default_factory=dict)
    error: str = ""
    tried_at: float = 0.0

    @property
    def now(self) -> float:
        """The moment up to which the journal is known. The journal has the lock server's clock, which may be ahead."""
        return max(self.at, max((entry.ended for entry in self.entries[-100:]), default=0.0))

    @property
    def trouble(self) -> str:
        """What is wrong, in words; empty if nothing is."""
        if not self.error:
            return ""
        known = f"You see what was true at {moment(self.at)} UTC." if self.at else "Nothing is known yet."
        return f"The lock server does not answer: {self.error}. {known}"


def place_of(lock: HeldLock) -> Place:
    return lock.key, lock.slot, lock.held.owner


def moment(at: float) -> str:
    """A point in time in UTC, in ISO 8601 but with a space for the T."""
    shown = datetime.fromtimestamp(min(max(at, 0.0), cleaned.MAX_SECONDS), tz=timezone.utc)
    return shown.isoformat(sep=" ", timespec="seconds")[:19]
