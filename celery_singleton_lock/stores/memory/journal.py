"""The journal in the memory of this process."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from celery_singleton_lock import clock
from celery_singleton_lock.forks import Mutex
from celery_singleton_lock.journal_entry import REFUSALS, Entry
from celery_singleton_lock.stores import store


class MemoryJournal:
    """A `Journal`."""

    def __init__(self, size: int) -> None:
        self._counts: Counter[str] = Counter()
        self._entries: deque[Entry] = deque(maxlen=size)
        self._refused: Counter[str] = Counter()
        self._mutex = Mutex(threading.RLock)  # A signal's handler may run a task while the journal is written.

    def write(self, counts: Mapping[str, int], entries: Sequence[Entry], *, now: float) -> Sequence[int]:
        with self._mutex.lock:
            self._counts.update(counts)
            self._entries.extend(entry.mirrored(now).mirrored(clock.wall()) for entry in entries)
            in_a_row = [self._in_a_row(entry) for entry in entries]
            if len(self._refused) > store.KEYS_REMEMBERED:
                self._refused.clear()
            return in_a_row

    def counts(self) -> dict[str, int]:
        with self._mutex.lock:
            return dict(self._counts)

    def entries(self, *, since: float) -> Iterator[Entry]:
        with self._mutex.lock:
            found = [entry for entry in self._entries if entry.ended >= since]
        yield from found

    def refused(self) -> dict[str, int]:
        with self._mutex.lock:
            return dict(self._refused)

    def _in_a_row(self, entry: Entry) -> int:
        if entry.kind in REFUSALS:
            self._refused[entry.key] += 1
            return self._refused[entry.key]
        if entry.kind == "run":
            self._refused.pop(entry.key, None)
        return 0
