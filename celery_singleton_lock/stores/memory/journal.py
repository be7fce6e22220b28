"""The journal in the memory of this process."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from celery_singleton_lock import clock
from celery_singleton_lock.journal_entry import REFUSALS, Entry
from celery_singleton_lock.mutex import Mutex
from celery_singleton_lock.stores.journal import MAX_LABELS, Written


class MemoryJournal:
    """A `Journal`."""

    def __init__(self, size: int) -> None:
        self._counts: Counter[str] = Counter()
        self._entries: deque[Entry] = deque(maxlen=size)
        self._last: dict[str, tuple[Entry, float]] = {}
        self._refused: Counter[str] = Counter()
        self._labels: dict[str, str] = {}
        self._mutex = Mutex()

    def write(
        self,
        counts: Mapping[str, int],
        entries: Sequence[Entry],
        *,
        slack: float,
        coarse: Mapping[str, str] | None = None,
    ) -> Written:
        with self._mutex.lock:
            self._counts.update(counts)
            for name in coarse or {}:
                self._labels.pop(name, None)
            self._labels.update(coarse or {})
            for name in [*self._labels][:-MAX_LABELS]:
                self._counts[self._labels.pop(name)] += self._counts.pop(name, 0)
            rows, overlaps = zip(*(self._add(entry, slack) for entry in entries), strict=True) if entries else ((), ())
            return Written(clock.wall(), rows, overlaps)

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

    def _add(self, entry: Entry, slack: float) -> tuple[int, Entry | None]:
        self._entries.append(entry)
        if entry.kind in REFUSALS:
            self._refused[entry.key] += 1
            return self._refused[entry.key], None
        if entry.kind != "run":
            return 0, None
        self._refused.pop(entry.key, None)
        return 0, self._overlap(entry, slack) if entry.limit == 1 else None

    def _overlap(self, entry: Entry, slack: float) -> Entry | None:
        other, its_slack = self._last.get(entry.key, (None, 0.0))
        if other is None or entry.ended > other.ended:
            self._last[entry.key] = entry, slack
        if other is None or other.fence == entry.fence:
            return None
        common = min(entry.ended, other.ended) - max(entry.began, other.began)
        return other if common > slack + its_slack else None
