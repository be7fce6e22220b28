"""Locks in the memory of this process: for tests and for `memory://` brokers. Excludes threads, not processes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from celery_singleton_lock import clock
from celery_singleton_lock.lease import Held, Holder, Lease


@dataclass(slots=True)
class _Entry:
    owner: str
    holder: Holder
    fence: int
    expires_at: float


class MemoryStore:
    """A `Store` in memory; instances do not see each other's locks."""

    server = "memory://"

    def __init__(self) -> None:
        self._fences = itertools.count(1)
        self._entries: dict[str, _Entry] = {}
        self._changed = threading.Condition()

    def acquire(self, key: str, owner: str, *, ttl: float, holder: Holder, waiting: bool = False) -> Lease | Held:
        sent_at = clock.now()
        with self._changed:
            entry = self._live(key)
            if entry is None:
                entry = self._entries[key] = _Entry(owner, holder, next(self._fences), sent_at + ttl)
            elif entry.owner != owner:
                return Held(entry.holder, entry.expires_at - sent_at)
            entry.expires_at = sent_at + ttl
            return Lease(key, owner, ttl=ttl, fence=entry.fence, sent_at=sent_at)

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[bool]:
        with self._changed:
            return [self._renew(lease) for lease in leases]

    def release(self, lease: Lease) -> bool:
        with self._changed:
            entry = self._live(lease.key)
            if entry is None or entry.owner != lease.owner:
                return False
            del self._entries[lease.key]
            self._changed.notify_all()
            return True

    def wait(self, key: str, timeout: float) -> None:
        with self._changed:
            entry = self._live(key)
            if entry is not None:
                self._changed.wait(min(timeout, max(entry.expires_at - clock.now(), 0)))

    def close(self) -> None:
        pass

    def _renew(self, lease: Lease) -> bool:
        entry = self._live(lease.key)
        if entry is None or entry.owner != lease.owner:
            return False
        sent_at = clock.now()
        entry.expires_at = sent_at + lease.ttl
        lease.extend(sent_at)
        return True

    def _live(self, key: str) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is not None and entry.expires_at <= clock.now():
            del self._entries[key]
            return None
        return entry
