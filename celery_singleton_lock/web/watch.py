"""Looks at the locks of an app for everybody who asks: one look at a time, which is reused for a moment."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock.diagnosis.held import HeldLock, held_locks
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.forks import Mutex
from celery_singleton_lock.journal import counts as metrics
from celery_singleton_lock.journal.counts import Count
from celery_singleton_lock.journal_entry import Entry
from celery_singleton_lock.keys.key import key_of_beat
from celery_singleton_lock.options.app import BeatSettings
from celery_singleton_lock.runtime import Runtime

#: Seconds for which a look is reused; and how many times longer than a look that is, if looks take long: with thousands
#: of locks, the lock server has other work to do.
FRESH, SPARING = 1.0, 5.0

#: The most entries of the journal that are kept here.
MOST_ENTRIES = 20_000

#: How many seconds of the journal are read again at each look. Entries are found by the server's clock, and this host's
#: clock may be ahead of it.
AGAIN = 60.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The locks of an app at one moment.

    Attributes:
        prefix: the prefix of their keys.
        at: the moment, in seconds since the epoch, by this host's clock.
        locks: the held locks, in order.
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


class Watch:
    """Looks at the locks of one app.

    Args:
        app: the Celery app.

    Raises:
        InvalidOption: a setting is wrong.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.runtime = Runtime.of(app)
        self.beat = BeatSettings.from_app(app)
        self._mutex = Mutex()
        self._latest = Snapshot(self.runtime.settings.prefix)
        self._fresh_until = float("-inf")
        self._read_at = 0.0
        self._entries: deque[Entry] = deque(maxlen=min(self.runtime.settings.journal, MOST_ENTRIES))
        self._recent: set[Entry] = set()

    @property
    def about(self) -> str:
        """The app whose locks these are, and their server."""
        return f"{self.app.main or 'the app'} on {self.runtime.settings.backend.masked}"

    @property
    def beat_key(self) -> str:
        """The key beside which it is recorded what beat has sent."""
        return key_of_beat(self.runtime.settings.prefix, self.beat.name)

    def look(self) -> Snapshot:
        """The state now, or a moment ago. If the server does not answer, the snapshot says so."""
        with self._mutex.lock:
            began = clock.now()
            if began >= self._fresh_until:
                self._latest = self._looked()
                now = clock.now()
                self._fresh_until = now + max(FRESH, (now - began) * SPARING)
            return self._latest

    def _looked(self) -> Snapshot:
        now, settings, store = clock.wall(), self.runtime.settings, self.runtime.store
        try:
            locks = held_locks(store, settings.prefix)
            journal = store.journal(settings.prefix, size=settings.journal)
            counts, refused = metrics.read(journal.counts()), journal.refused()
            if settings.journal:
                self._read([*journal.entries(since=self._read_at)], now)
            lasts = store.ledger(self.beat_key).lasts()
        except LockUnavailable as error:
            return replace(self._latest, error=cleaned.line(str(error)), tried_at=now)
        # Sorted, because each process writes its entries only every few seconds.
        entries = sorted(self._entries, key=lambda entry: entry.ended)
        lasts = {cleaned.text(entry): last for entry, last in lasts.items()}
        refused = {cleaned.key(key): count for key, count in refused.items()}
        return Snapshot(settings.prefix, now, locks, counts, refused, entries, lasts, tried_at=now)

    def _read(self, entries: list[Entry], now: float) -> None:
        """Keep the entries that are new. Of those read before, only the latest are read again."""
        self._entries.extend(entry for entry in entries if entry not in self._recent)
        self._recent = set(entries)
        self._read_at = max(now - AGAIN, 0.0)
