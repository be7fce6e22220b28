"""The ledger in the memory of this process."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence

from celery_singleton_lock import clock
from celery_singleton_lock.forks import Mutex
from celery_singleton_lock.stores.store import MEMORY, Refused


class MemoryLedger:
    """A `Ledger`."""

    def __init__(self) -> None:
        self._lasts: dict[str, int] = {}
        self._gone: dict[str, tuple[int, float]] = {}
        self._claims: dict[str, tuple[str, float]] = {}
        self._secret = secrets.token_hex(16)
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

    def claim(self, entry: str, last: int, owner: str, *, ttl: float, ceiling: int) -> Refused | str:
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
            return self._secret

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
