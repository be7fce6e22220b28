"""Locks in the memory of this process: for tests and for `memory://` brokers. Excludes threads, not processes."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from celery_singleton_lock import clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.journal_entry import REFUSALS, Entry
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.mutex import Mutex
from celery_singleton_lock.stores.base import Held, LockRequest, Record, Reservation
from celery_singleton_lock.stores.inspector import MOST_RECORDS, KeyState
from celery_singleton_lock.stores.journal import MAX_LABELS, Written
from celery_singleton_lock.stores.ledger import MEMORY, Refused
from celery_singleton_lock.stores.waiters import AskingWaiter

#: Seconds at least for which it is known that an owner was given up.
OVER = 60.0


#: Seconds from being refused to waiting, and from a release to a claim of its wake-up.
CLAIMED_WITHIN = 1.0


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
        self._entries: dict[str, dict[int, _Entry]] = {}
        self._records: dict[tuple[str, str], tuple[bytes, float]] = {}
        #: Owners that were given up, and until when that is known.
        self._over: dict[tuple[str, str], float] = {}
        self._mutex = Mutex()
        self._waiting: dict[str, deque[_MemoryBell]] = {}
        #: When somebody was last refused that is about to wait, and when a release has found nobody waiting yet.
        self._refused: dict[str, float] = {}
        self._unclaimed: dict[str, float] = {}
        self._ledgers: dict[str, _MemoryLedger] = {}
        self._journals: dict[str, _MemoryJournal] = {}

    def acquire(self, request: LockRequest) -> Lease | Held | Record:
        key, holder, sent_at = request.key, request.holder, clock.now()
        with self._mutex.lock:
            if self._over.get((key, request.owner), 0.0) > sent_at:
                raise LockUnavailable(self.server, "this owner was given up")
            for name in request.given_up:
                self._give_up(key, name, request.ttl)
            if request.once and (record := self._record(key, holder.message)):
                return record
            live = self._live(key)
            slot = _slot_of(request.owner, live)
            if slot is None:
                reserved = _slot_of(holder.reserved_as, live)
                slot = _slot_for(holder, live, request.limit, reserved)
                if slot is None:
                    if request.waiting:
                        self._refused[key] = sent_at
                    return _blocker(holder, live, sent_at)
                if reserved is not None:
                    del live[reserved]
                taken = _Entry(request.owner, replace(holder, ttl=request.ttl), next(self._fences), 0.0)
                self._entries.setdefault(key, {})[slot] = taken
            entry = self._entries[key][slot]
            entry.expires_at = sent_at + request.ttl
            return request.lease(fence=entry.fence, sent_at=sent_at, slot=slot)

    def renew(self, holds: Sequence[Hold], *, timeout: float) -> list[bool]:
        with self._mutex.lock:
            return [self._renew(hold) for hold in holds]

    def free(self, hold: Hold, *, record: Record | None = None, reservation: Reservation | None = None) -> bool:
        with self._mutex.lock:
            if record is not None:
                self._remember(hold.key, record)
            live = self._live(hold.key)
            slot = _slot_of(hold.owner, live)
            if slot is None:
                return False
            fence = self._entries[hold.key].pop(slot).fence
            if reservation is not None and not self._is_over(hold.key, reservation.holder, record):
                holder = reservation.holder
                reserved = _Entry(holder.reserved_as, holder, fence, clock.now() + reservation.seconds)
                self._entries[hold.key][slot] = reserved
            self._wake(hold.key)
            return True

    def abandon(self, hold: Hold) -> bool | None:
        with self._mutex.lock:
            return self._give_up(hold.key, hold.owner, hold.ttl)

    def remember(self, key: str, record: Record) -> None:
        with self._mutex.lock:
            self._remember(key, record)

    def refuse(self, key: str, holder: Holder, record: Record, *, limit: int = 1) -> Held | Record | None:
        with self._mutex.lock:
            known, now = self._record(key, record.message), clock.now()
            if known is not None:
                return None if known.content == record.content else known
            for entry in self._live(key).values():
                of_same = entry.holder.is_copy_of(holder) and entry.holder.attempt == holder.attempt
                if of_same or entry.owner == holder.reserved_as:
                    return Held(entry.holder, entry.owner, entry.expires_at - now)
            self._remember(key, record)
            return None

    def replace_records(self, records: Sequence[tuple[str, Record]]) -> None:
        with self._mutex.lock:
            for key, record in records:
                if self._record(key, record.message) is not None:
                    self._remember(key, record)

    def waiter(self, request: LockRequest) -> AskingWaiter:
        waiting = replace(request, waiting=True)
        return AskingWaiter(_MemoryBell(self, request.key), lambda: self.acquire(waiting))

    def queue(self, bell: _MemoryBell) -> None:
        """Put a waiter at the end, if it is not in the queue."""
        with self._mutex.lock:
            waiting = self._waiting.setdefault(bell.key, deque())
            if bell in waiting or bell.woken.is_set():
                return
            if clock.now() - self._unclaimed.pop(bell.key, 0.0) < CLAIMED_WITHIN:
                bell.woken.set()  # The lock was freed between the look and this.
            else:
                waiting.append(bell)

    def leave(self, bell: _MemoryBell) -> None:
        """Take a waiter out; the wake-up that it has got and not used is for the next one."""
        with self._mutex.lock:
            waiting = self._waiting.get(bell.key, deque())
            if bell in waiting:
                waiting.remove(bell)
            elif bell.woken.is_set() and waiting:
                waiting.popleft().woken.set()
            if not waiting:
                self._waiting.pop(bell.key, None)

    def held(self, key: str, *, limit: int = 1) -> list[Held]:
        with self._mutex.lock:
            return self._held_now(key)

    def all_held(self, prefix: str) -> Iterator[tuple[str, Held]]:
        with self._mutex.lock:
            keys = [key for key in self._entries if key.startswith(f"{prefix}:")]
            found = [(key, held) for key in keys for held in self._held_now(key)]
        yield from found

    def inspect(self, key: str) -> KeyState:
        with self._mutex.lock:
            self._forget_old_records()
            now, waiters = clock.now(), len(self._waiting.get(key, ()))
            fences = [entry.fence for entry in self._live(key).values()]
            latest = sorted(self._records.items(), key=lambda record: record[1][1], reverse=True)
            records = [Record(message, content, until - now) for (of, message), (content, until) in latest if of == key]
            return KeyState(
                tuple(self._held_now(key)), max(fences, default=None), waiters, tuple(records[:MOST_RECORDS])
            )

    def ledger(self, key: str) -> _MemoryLedger:
        return self._ledgers.setdefault(key, _MemoryLedger())

    def journal(self, prefix: str, *, size: int) -> _MemoryJournal:
        return self._journals.setdefault(prefix, _MemoryJournal(size))

    def close(self) -> None:
        pass

    def _give_up(self, key: str, owner: str, ttl: float) -> bool:
        now = clock.now()
        self._over = {place: until for place, until in self._over.items() if until > now}
        self._over[key, owner] = now + max(ttl, OVER)
        slot = _slot_of(owner, self._live(key))
        if slot is None:
            return False
        del self._entries[key][slot]
        self._wake(key)
        return True

    def _wake(self, key: str) -> None:
        if waiting := self._waiting.get(key):
            waiting.popleft().woken.set()
        elif key in self._refused and clock.now() - self._refused.pop(key) < CLAIMED_WITHIN:
            self._unclaimed[key] = clock.now()

    def _renew(self, hold: Hold) -> bool:
        live = self._live(hold.key)
        slot = _slot_of(hold.owner, live)
        if slot is None:
            return False
        sent_at = clock.now()
        live[slot].expires_at = sent_at + hold.ttl
        if isinstance(hold, Lease):
            hold.extend(sent_at)
        return True

    def _live(self, key: str) -> dict[int, _Entry]:
        now = clock.now()
        live = {slot: entry for slot, entry in self._entries.get(key, {}).items() if entry.expires_at > now}
        if live:
            self._entries[key] = live
        else:
            self._entries.pop(key, None)
        return live

    def _held_now(self, key: str) -> list[Held]:
        now, waiters, live = clock.now(), len(self._waiting.get(key, ())), self._live(key)
        return [
            Held(live[slot].holder, live[slot].owner, live[slot].expires_at - now, slot, waiters)
            for slot in sorted(live)
        ]

    def _is_over(self, key: str, holder: Holder, record: Record | None) -> bool:
        """Whether a message that the lock is to be reserved for has ended, otherwise than by this record."""
        own = record is not None and record.message == holder.message
        return not own and self._record(key, holder.message) is not None

    def _record(self, key: str, message: str) -> Record | None:
        self._forget_old_records()
        found = self._records.get((key, message))
        return None if found is None else Record(message, found[0], found[1] - clock.now())

    def _remember(self, key: str, record: Record) -> None:
        self._records[key, record.message] = record.content, clock.now() + record.seconds

    def _forget_old_records(self) -> None:
        now = clock.now()
        for place in [place for place, (_, until) in self._records.items() if until <= now]:
            del self._records[place]


class _MemoryBell:
    """A place in the queue of a lock."""

    def __init__(self, store: MemoryStore, key: str) -> None:
        self._store = store
        self.key = key
        self.woken = threading.Event()

    def __exit__(self, *_: object) -> None:
        self._store.leave(self)

    def wait(self, timeout: float) -> None:
        self._store.queue(self)
        if self.woken.wait(timeout):
            self.woken.clear()


class _MemoryLedger:
    """What beat has sent."""

    def __init__(self) -> None:
        self._lasts: dict[str, int] = {}
        self._gone: dict[str, tuple[int, float]] = {}
        self._claims: dict[str, tuple[str, float]] = {}
        self._secret = secrets.token_hex(16)
        self._mutex = Mutex()

    def align(self, lasts: Mapping[str, int], *, ceiling: int) -> dict[str, int]:
        with self._mutex.lock:
            known = {entry: self._known(entry, ceiling) for entry in lasts}
            found = {entry: last if known[entry] is None else known[entry] or 0 for entry, last in lasts.items()}
            now = clock.now()
            self._gone = {entry: (last, until) for entry, (last, until) in self._gone.items() if until > now}
            self._gone |= {entry: (last, now + MEMORY) for entry, last in self._lasts.items() if entry not in lasts}
            self._lasts = {entry: last for entry, last in found.items() if last}
            return found

    def claim(self, lasts: Mapping[str, int], owner: str, *, ttl: float, ceiling: int) -> dict[str, Refused]:
        with self._mutex.lock:
            refused, now = {}, clock.now()
            for entry, last in lasts.items():
                gone, until = self._gone.get(entry, (0, 0.0))
                known = self._lasts.get(entry, gone if until > now else 0)
                claimer, until = self._claims.get(entry, (owner, 0.0))
                if last < known <= ceiling:
                    refused[entry] = Refused(known, 0.0)
                elif claimer != owner and until > now:
                    refused[entry] = Refused(None, until - now)
                else:
                    self._claims[entry] = owner, now + ttl
            return refused

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

    def secret(self) -> str:
        return self._secret

    def _known(self, entry: str, ceiling: int) -> int | None:
        known = self._lasts.get(entry)
        return None if known is None or known > ceiling else known


class _MemoryJournal:
    """What became of all copies."""

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


def _slot_of(owner: str, live: Mapping[int, _Entry]) -> int | None:
    return next((slot for slot, entry in live.items() if entry.owner == owner), None)


def _slot_for(holder: Holder, live: Mapping[int, _Entry], limit: int, kept: int | None) -> int | None:
    """Kept for it, or free; None if there is none, or another copy of it runs."""
    others = [entry for slot, entry in live.items() if slot != kept]
    if any(entry.holder.is_copy_of(holder) for entry in others):
        return None
    if kept is not None and kept < limit:
        return kept
    # What is held counts, whoever's limit it was taken under; what is kept there moves to within this one.
    free = next((slot for slot in range(limit) if slot not in live), None)
    return free if kept is not None or len(live) < limit else None


def _blocker(holder: Holder, live: Mapping[int, _Entry], now: float) -> Held:
    others = [entry for entry in live.values() if entry.owner != holder.reserved_as]
    copies = [entry for entry in others if entry.holder.is_copy_of(holder)]
    entry = min(copies or others, key=lambda entry: entry.expires_at)
    return Held(entry.holder, entry.owner, entry.expires_at - now)
