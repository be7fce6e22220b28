"""Locks in the memory of this process: for tests and for `memory://` brokers. Excludes threads, not processes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from celery_singleton_lock import clock
from celery_singleton_lock.lease import Done, Heir, Held, Holder, Lease, Mark, heir_of


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
        self._marks: dict[tuple[str, str], tuple[bytes, float]] = {}
        self._changed = threading.Condition()

    def acquire(
        self, key: str, owner: str, *, ttl: float, holder: Holder, waiting: bool = False, once: bool = False
    ) -> Lease | Held | Done:
        sent_at = clock.now()
        with self._changed:
            if once and (done := self._done(key, holder.message)):
                return done
            entry = self._live(key)
            if entry is None or entry.owner == heir_of(holder):
                entry = self._entries[key] = _Entry(owner, holder, next(self._fences), sent_at + ttl)
            elif entry.owner != owner:
                return Held(entry.holder, entry.owner, entry.expires_at - sent_at)
            entry.expires_at = sent_at + ttl
            return Lease(key, owner, ttl=ttl, fence=entry.fence, sent_at=sent_at)

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[bool]:
        with self._changed:
            return [self._renew(lease) for lease in leases]

    def release(self, lease: Lease, *, mark: Mark | None = None, heir: Heir | None = None) -> bool:
        with self._changed:
            now = clock.now()
            if mark is not None:
                self._marks[lease.key, mark.message] = mark.record, now + mark.seconds
            entry = self._live(lease.key)
            if entry is None or entry.owner != lease.owner:
                return False
            del self._entries[lease.key]
            if heir is not None:
                self._entries[lease.key] = _Entry(heir_of(heir.holder), heir.holder, entry.fence, now + heir.seconds)
            self._changed.notify_all()
            return True

    def wait(self, key: str, timeout: float) -> None:
        with self._changed:
            entry = self._live(key)
            if entry is not None:
                self._changed.wait(min(timeout, max(entry.expires_at - clock.now(), 0)))

    def holds(self, prefix: str) -> Iterator[tuple[str, Held]]:
        with self._changed:
            now, keys = clock.now(), [key for key in self._entries if key.startswith(f"{prefix}:")]
            live = [(key, entry) for key in keys if (entry := self._live(key))]
        for key, entry in live:
            yield key, Held(entry.holder, entry.owner, entry.expires_at - now)

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

    def _done(self, key: str, message: str) -> Done | None:
        now = clock.now()
        for place in [place for place, (_, until) in self._marks.items() if until <= now]:
            del self._marks[place]
        found = self._marks.get((key, message))
        return None if found is None else Done(found[0], found[1] - now)
