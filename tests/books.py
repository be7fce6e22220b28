"""A store in memory that keeps what beat has sent and the journal, too: for tests of what reads and writes these."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from celery_singleton_lock import clock
from celery_singleton_lock.forks import Mutex
from celery_singleton_lock.journal_entry import REFUSALS, Entry
from celery_singleton_lock.stores import store as stores
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.store import MEMORY, Refused


class StoreWithBooks(MemoryStore):
    """A `MemoryStore` with ledgers and journals."""

    def __init__(self) -> None:
        super().__init__()
        self._ledgers: dict[str, MemoryLedger] = {}
        self._journals: dict[str, MemoryJournal] = {}

    def ledger(self, key: str) -> MemoryLedger:  # type: ignore[override]
        return self._ledgers.setdefault(key, MemoryLedger())

    def journal(self, prefix: str, *, size: int) -> MemoryJournal:  # type: ignore[override]
        return self._journals.setdefault(prefix, MemoryJournal(size))


class MemoryLedger:
    """A `Ledger`."""

    def __init__(self) -> None:
        self._lasts: dict[str, int] = {}
        self._gone: dict[str, tuple[int, float]] = {}
        self._claims: dict[str, tuple[str, float]] = {}
        self._mutex = Mutex(threading.RLock)  # A signal's handler that closes beat may have interrupted its close.

    def align(self, lasts: Mapping[str, int], *, ceiling: int) -> dict[str, int]:
        with self._mutex.lock:
            now = clock.now()
            self._gone = {entry: (last, until) for entry, (last, until) in self._gone.items() if until > now}
            found = {entry: self._aligned(entry, last, ceiling) for entry, last in lasts.items()}
            self._gone |= {entry: (last, now + MEMORY) for entry, last in self._lasts.items() if entry not in lasts}
            self._lasts = {entry: last for entry, last in found.items() if last}
            return found

    def lasts(self) -> dict[str, int]:
        with self._mutex.lock:
            return dict(self._lasts)

    def claim(self, entry: str, last: int, owner: str, *, ttl: float, ceiling: int) -> Refused | None:
        with self._mutex.lock:
            now = clock.now()
            gone, until = self._gone.get(entry, (0, 0.0))
            known = self._lasts.get(entry, gone if until > now else 0)
            claimer, until = self._claims.get(entry, (owner, 0.0))
            if last < known <= ceiling:
                return Refused(known, 0.0)
            if claimer != owner and until > now:
                return Refused(None, until - now, claimer)
            self._claims[entry] = owner, now + ttl
            return None

    def record(self, lasts: Mapping[str, int], owner: str, *, ceiling: int) -> None:
        with self._mutex.lock:
            for entry, last in lasts.items():
                if last > (self._known(entry, ceiling) or 0):
                    self._lasts[entry] = last
                if self._claims.get(entry, (None, 0.0))[0] == owner:
                    del self._claims[entry]

    def unclaim(self, entries: Sequence[str], owner: str) -> None:
        with self._mutex.lock:
            # Nothing is carried out late here.
            for entry in entries:
                if self._claims.get(entry, (None, 0.0))[0] == owner:
                    del self._claims[entry]

    def _aligned(self, entry: str, given: int, ceiling: int) -> int:
        """The last run of an entry, which was `given`."""
        known, (gone, _) = self._known(entry, ceiling), self._gone.get(entry, (0, 0.0))
        if known is not None:
            return known
        return max(given, gone) if given and gone <= ceiling else given

    def _known(self, entry: str, ceiling: int) -> int | None:
        known = self._lasts.get(entry)
        return None if known is None or known > ceiling else known


class MemoryJournal:
    """A `Journal`."""

    def __init__(self, size: int) -> None:
        self._counts: Counter[str] = Counter()
        self._entries: deque[Entry] = deque(maxlen=size)
        self._refused: Counter[str] = Counter()
        self._mutex = Mutex(threading.RLock)  # A signal's handler may have interrupted a writer.

    def write(self, counts: Mapping[str, int], entries: Sequence[Entry], *, now: float) -> Sequence[int]:
        with self._mutex.lock:
            self._counts.update(counts)
            self._entries.extend(entry.mirrored(now).mirrored(clock.wall()) for entry in entries)
            in_a_row = [self._in_a_row(entry) for entry in entries]
            if len(self._refused) > stores.KEYS_REMEMBERED:
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
