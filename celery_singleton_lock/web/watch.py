"""Looks at the locks of an app for everybody who asks: one look at a time, which is reused for a moment."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from celery_singleton_lock import cleaned, clock
from celery_singleton_lock.diagnosis.held import HeldLock, in_order
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.journal import counts as metrics
from celery_singleton_lock.journal_entry import Entry
from celery_singleton_lock.keys.key import key_of_beat
from celery_singleton_lock.mutex import Mutex
from celery_singleton_lock.options.beat import BeatSettings
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Held
from celery_singleton_lock.web.snapshot import Place, Snapshot, place_of

#: Seconds for which a look is reused.
FRESH = 1.0

#: Seconds by which the end of a lock must move to count as moved.
NOISE = 0.9

#: The most entries of the journal that are kept here.
MOST_ENTRIES = 20_000

#: How many seconds of the journal are read again at each look. Entries are found by the server's clock, and this host's
#: clock may be ahead of it.
AGAIN = 60.0


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
        self._asked_at = float("-inf")
        self._read_at = 0.0
        self._entries: deque[Entry] = deque(maxlen=min(self.runtime.settings.journal, MOST_ENTRIES))
        self._recent: set[Entry] = set()

    @property
    def about(self) -> str:
        """The app whose locks these are, and their server."""
        return f"{self.app.main or 'the app'} on {self.runtime.settings.backend.masked}"

    @property
    def beat_key(self) -> str:
        """The key of the lock that beat's leader holds."""
        return key_of_beat(self.runtime.settings.prefix, self.beat.name)

    def look(self, *, fresh: float = FRESH) -> Snapshot:
        """The state now, or less than `fresh` seconds ago. If the server does not answer, the snapshot says so."""
        with self._mutex.lock:
            if clock.now() - self._asked_at >= fresh:
                self._latest = self._looked()
                self._asked_at = clock.now()
            return self._latest

    def _looked(self) -> Snapshot:
        now, settings, store = clock.wall(), self.runtime.settings, self.runtime.store
        try:
            ends: dict[Place, float] = {}
            locks = in_order(self._of(key, held, ends) for key, held in store.all_held(settings.prefix))
            journal = store.journal(settings.prefix, size=settings.journal)
            counts, refused = metrics.read(journal.counts()), journal.refused()
            if settings.journal:
                self._read([*journal.entries(since=self._read_at)], now)
            lasts = store.ledger(self.beat_key).lasts()
        except LockUnavailable as error:
            return replace(self._latest, error=cleaned.line(error), tried_at=now)
        # Sorted, because each process writes its entries only every few seconds.
        entries = sorted(self._entries, key=lambda entry: entry.ended)
        lasts = {cleaned.text(entry): last for entry, last in lasts.items()}
        refused = {cleaned.key(key): count for key, count in refused.items()}
        return Snapshot(settings.prefix, now, locks, ends, counts, refused, entries, lasts, tried_at=now)

    def _of(self, key: str, held: Held, ends: dict[Place, float]) -> HeldLock:
        """A lock. Its end in `ends` is the same as before unless it was renewed, however long the request took."""
        lock = HeldLock.of(key, held)
        if lock.expires_in is not None:
            place, end = place_of(lock), clock.wall() + lock.expires_in
            before = self._latest.ends.get(place, 0.0)
            ends[place] = before if abs(end - before) < NOISE else end
        return lock

    def _read(self, entries: list[Entry], now: float) -> None:
        """Keep the entries that are new. Of those read before, only the latest are read again."""
        self._entries.extend(entry for entry in entries if entry not in self._recent)
        self._recent = set(entries)
        self._read_at = max(now - AGAIN, 0.0)
