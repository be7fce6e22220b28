"""Locks in the memory of this process: for tests and for `memory://` brokers. They exclude threads, not processes.

What beat has sent, and the journal, need a lock server.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from celery_singleton_lock import clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.forks import Mutex
from celery_singleton_lock.holder import Holder, task_of_member
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.base import Freeing, Held, LockRequest, Record, Reservation, Superseded
from celery_singleton_lock.stores.store import MOST_RECORDS, KeyState, Place
from celery_singleton_lock.stores.waiters import LOOK, Mailbox, Waiter

#: The least seconds for which it is remembered that an owner was given up.
OVER = 60.0

#: Seconds for which a waiter counts that has not asked again: a free lock is left to it for as long.
WAITS_WITHIN = 2 * LOOK

#: The most messages in an order whose arrival is remembered.
KNOWN = 1000


class MemoryStore:
    """A `Store` in memory; instances do not see each other's locks."""

    server = "memory://"

    def __init__(self) -> None:
        self._fence = 0
        #: By key, and by owner; only `_live` knows which of them have ended.
        self._occupants: dict[str, dict[str, Occupant]] = {}
        #: Contents, and until when they are kept, by key and message; the last to be written is the last.
        self._records: dict[tuple[str, str], tuple[bytes, float]] = {}
        #: Owners that were given up, and until when that is remembered.
        self._over: dict[tuple[str, str], float] = {}
        self._mutex = Mutex(threading.RLock)  # A signal's handler that closes beat may have interrupted its close.
        #: By key, and by waiter: since when it waits, and until when it counts unless it asks again.
        self._places: dict[str, dict[str, tuple[float, float]]] = {}
        #: When the messages of an order, of which only the newest runs, came; and until when that is remembered.
        self._orders: dict[tuple[str, str], tuple[dict[str, int], float]] = {}
        self.mailbox = Mailbox()

    def acquire(self, request: LockRequest) -> Lease | Held | Record:
        if request.waiting:
            self.mailbox.enrol(request)
        key, holder, sent_at = request.key, request.holder, clock.now()
        with self._mutex.lock:
            if self._over.get((key, request.owner), 0.0) > sent_at:
                raise LockUnavailable(self.server, "this owner was given up")
            for name in request.given_up:
                self._give_up(key, name, request.ttl)
            if request.check_finished and (record := self._record(key, holder.message)):
                self._vacate(key, request.owner)
                return record
            live = self._live(key)
            arrived, newer = self._arrive(request)
            if request.owner not in live:
                stops = request.arrival is not None and request.arrival.stops
                if newer and stops:
                    live.pop(holder.kept_as, None)  # It must not keep the newest waiting.
                is_its = any(it.holder.is_copy_of(holder) or it.owner == holder.kept_as for it in live.values())
                if newer and not is_its:
                    return self._superseded(request, newer, live)
                if not has_room(request, live) and not (stops and not is_its and _stop(request, live)):
                    met = in_the_way(request, live)
                    # One whose message runs holds nobody back from the other places.
                    self._enrol(request, math.inf if met.holder.is_copy_of(holder) else request.since)
                    return replace(met.held(sent_at), arrived=arrived)
                if request.since and len(live) + self._before(request) >= request.limit and not is_its:
                    self._enrol(request, request.since)
                    return Held(None, "", WAITS_WITHIN, arrived=arrived)
                self._places.get(key, {}).pop(request.member, None)
                live.pop(holder.kept_as, None)
                live[request.owner] = Occupant(request.owner, holder, self._next_fence(), 0.0)
                self._occupants[key] = live
            occupant = live[request.owner]
            if occupant.holder.superseded_by is None:  # Which is not to be forgotten.
                occupant.holder = replace(holder, ttl=request.ttl)
            occupant.ends_at = max(occupant.ends_at, sent_at + request.ttl)
            return request.lease(fence=occupant.fence, sent_at=sent_at)

    def renew(self, holds: Sequence[Hold], *, timeout: float) -> list[bool]:
        with self._mutex.lock:
            return [self._renew(hold) for hold in holds]

    def free(self, hold: Hold, *, record: Record | None = None, reservation: Reservation | None = None) -> Freeing:
        with self._mutex.lock:
            if record is not None:
                self._remember(hold.key, record)
            live = self._live(hold.key)
            if hold.owner not in live:
                return Freeing.NOT_OURS
            fence = live.pop(hold.owner).fence
            if reservation is not None and not self._has_ended(hold.key, reservation.holder, record):
                holder = reservation.holder
                reserved = Occupant(holder.reserved_as, holder, fence, clock.now() + reservation.seconds)
                live[reserved.owner] = reserved
            self._wake(hold.key)
            return Freeing.NOW

    def abandon(self, hold: Hold) -> bool | None:
        with self._mutex.lock:
            return self._give_up(hold.key, hold.owner, hold.ttl)

    def remember(self, key: str, record: Record) -> None:
        with self._mutex.lock:
            self._remember(key, record)

    def refuse(self, key: str, holder: Holder, record: Record) -> Held | Record | None:
        with self._mutex.lock:
            known, now = self._record(key, record.message), clock.now()
            if known is not None:
                return None if known.content == record.content else known
            if (copy := copy_of(holder, self._live(key))) is not None:
                return copy.held(now)
            self._remember(key, record)
            return None

    def replace_records(self, records: Sequence[tuple[str, Record]]) -> None:
        with self._mutex.lock:
            for key, record in records:
                if self._record(key, record.message) is not None:
                    self._remember(key, record)

    def recorded(self, key: str, message: str) -> Record | None:
        with self._mutex.lock:
            return self._record(key, message)

    def held(self, key: str) -> list[Held]:
        with self._mutex.lock:
            now, waiters = clock.now(), self._waiters(key)
            return [it.held(now, waiters) for it in sorted(self._live(key).values(), key=lambda it: it.fence)]

    def all_held(self, prefix: str) -> Iterator[tuple[str, Held]]:
        with self._mutex.lock:
            keys = [key for key in self._occupants if key.startswith(f"{prefix}:")]
            found = [(key, held) for key in keys for held in self.held(key)]
        yield from found

    def inspect(self, key: str) -> KeyState:
        with self._mutex.lock:
            messages = [message for of, message in self._records if of == key]
            records = [record for message in messages if (record := self._record(key, message)) is not None]
            latest = sorted(records, key=lambda record: record.seconds, reverse=True)[:MOST_RECORDS]
            fence = max((it.fence for it in self._live(key).values()), default=None)
            return KeyState(tuple(self.held(key)), fence, self._waiters(key), tuple(latest))

    def waiter(self, request: LockRequest) -> Waiter:
        def leave(frees: bool) -> None:
            if frees:
                self.abandon(request.hold())
            self.leave(request.key, request.member)

        return Waiter(self.mailbox, request, lambda: self.acquire(request), leave)

    def look(self, places: Sequence[Place]) -> NoReturn:
        raise LockUnavailable(self.server, "its waiters are threads of this process")

    def wake(self, key: str, leaves: str = "") -> bool:
        with self._mutex.lock:
            return self._wake(key)

    def leave(self, key: str, name: str) -> None:
        with self._mutex.lock:
            if self._places.get(key, {}).pop(name, None) is not None:
                self._wake(key)  # A free lock may have been left to it.

    def place_of(self, key: str) -> None:
        return None

    def ledger(self, key: str) -> NoReturn:
        raise LockUnavailable(self.server, "the memory of a process keeps nothing for beat, which needs a lock server")

    def journal(self, prefix: str, *, size: int) -> NoReturn:
        raise LockUnavailable(self.server, "the memory of a process keeps no journal, which needs a lock server")

    def close(self) -> None:
        pass

    def _arrive(self, request: LockRequest) -> tuple[int | None, str | None]:
        """The number of the request's message in the order of its key; the newest message, if that is another one."""
        if request.arrival is None:
            return None, None
        now = clock.now()
        self._orders = {key: found for key, found in self._orders.items() if found[1] > now}
        whose = request.key, request.arrival.task
        order, until = self._orders.get(whose, ({}, 0.0))
        self._orders[whose] = order, max(until, now + request.arrival.seconds)
        name, highest = request.holder.order_member, max(order.values(), default=0)
        # The last fence may be the number of a message that has not asked.
        next_number = max(highest + 1, int(clock.wall() * 1e6), self._fence + 1)
        number = order.setdefault(name, min(request.arrival.number or next_number, next_number))
        while len(order) > KNOWN:
            del order[min(order, key=order.__getitem__)]
        return number, max(order, key=order.__getitem__) if number < highest else None

    def _next_fence(self) -> int:
        self._fence = max(self._fence + 1, int(clock.wall() * 1e6))
        return self._fence

    def _superseded(self, request: LockRequest, newer: str, live: Occupants) -> Superseded:
        """The answer to its message, which does not take the lock that it was woken for, or has found free."""
        by = task_of_member(newer.encode())
        if not live:
            self._wake(request.key)
            return Superseded(None, "", 0.0, by=by)
        met = in_the_way(request, live).held(clock.now())
        return Superseded(met.holder, met.owner, met.remaining, by=by)

    def _give_up(self, key: str, owner: str, ttl: float) -> bool:
        now = clock.now()
        self._over = {place: until for place, until in self._over.items() if until > now}
        self._over[key, owner] = now + max(ttl, OVER)
        return self._vacate(key, owner)

    def _vacate(self, key: str, owner: str) -> bool:
        if self._live(key).pop(owner, None) is None:
            return False
        self._wake(key)
        return True

    def _renew(self, hold: Hold) -> bool:
        found, sent_at = self._live(hold.key).get(hold.owner), clock.now()
        if found is None:
            return False
        found.ends_at = max(sent_at + hold.ttl, found.ends_at if hold.only_longer else 0.0)
        if isinstance(hold, Lease):
            hold.extend(sent_at, hold.ttl)
        hold.supersede(found.holder.superseded_by)
        return True

    def _live(self, key: str) -> dict[str, Occupant]:
        now = clock.now()
        live = {owner: it for owner, it in self._occupants.pop(key, {}).items() if it.ends_at > now}
        if live:
            self._occupants[key] = live
        return live

    def _has_ended(self, key: str, holder: Holder, record: Record | None) -> bool:
        """Whether a message that the lock is to be reserved for has ended, other than by this record."""
        own = record is not None and record.message == holder.message
        return not own and self._record(key, holder.message) is not None

    def _record(self, key: str, message: str) -> Record | None:
        content, until = self._records.get((key, message), (b"", 0.0))
        seconds = until - clock.now()
        return Record(message, content, seconds) if seconds > 0 else None

    def _remember(self, key: str, record: Record) -> None:
        self._records.pop((key, record.message), None)
        self._records[key, record.message] = record.content, clock.now() + record.seconds
        while self._records and self._record(*(oldest := next(iter(self._records)))) is None:
            del self._records[oldest]

    def _waiters(self, key: str) -> int:
        return len(self._there(key))

    def _there(self, key: str) -> dict[str, tuple[float, float]]:
        """The waiters of a lock that have asked lately."""
        now = clock.now()
        there = {name: place for name, place in self._places.pop(key, {}).items() if place[1] > now}
        if there:
            self._places[key] = there
        return there

    def _enrol(self, request: LockRequest, since: float) -> None:
        if request.waiting:
            self._places.setdefault(request.key, {})[request.member] = since, clock.now() + WAITS_WITHIN

    def _before(self, request: LockRequest) -> int:
        """How many have waited for longer."""
        places = self._there(request.key).items()
        return sum(since < request.since for name, (since, _) in places if name != request.member)

    def _wake(self, key: str) -> bool:
        """Wake all waiters: each asks, and the lock is left to the first one."""
        there = self._there(key)
        for name in there:
            self.mailbox.deliver(name)
        return bool(there)


@dataclass(slots=True)
class Occupant:
    """A holder of a lock.

    Attributes:
        owner, holder: as they acquired it last, or as it is reserved for them.
        fence: the lease's fencing token.
        ends_at: when the lease, or the reservation, ends; by the store's clock.
    """

    owner: str
    holder: Holder
    fence: int
    ends_at: float

    def held(self, now: float, waiters: int = 0) -> Held:
        """What a newcomer finds."""
        return Held(self.holder, self.owner, self.ends_at - now, waiters=waiters, fence=self.fence)


#: The occupants of a key, by their owners; none of them has ended.
Occupants = Mapping[str, Occupant]


def has_room(request: LockRequest, occupants: Occupants) -> bool:
    """Whether fewer hold the lock than the request's limit, and none of them is a copy of its message."""
    others = [it for it in occupants.values() if it.owner != request.holder.kept_as]
    if any(it.holder.is_copy_of(request.holder) for it in others):
        return False
    if len(others) < len(occupants):
        # Its next attempt begins beside what is only kept for others: they would wait for each other otherwise. What is
        # kept for nobody was taken from a task that may still run.
        others = [it for it in others if it.holder.ttl or it.holder.is_nobody]
    return len(others) < request.limit


def in_the_way(request: LockRequest, occupants: Occupants) -> Occupant:
    """What keeps this request from the lock: a copy of its message, or the lease that ends first."""
    others = [it for it in occupants.values() if it.owner != request.holder.kept_as]
    copies = [it for it in others if it.holder.is_copy_of(request.holder)]
    return min(copies or others, key=lambda it: it.ends_at)


def copy_of(holder: Holder, occupants: Occupants) -> Occupant | None:
    """The holder that carries out the same message, or has it reserved."""
    for it in occupants.values():
        if it.owner == holder.kept_as or (it.holder.is_copy_of(holder) and it.holder.attempt == holder.attempt):
            return it
    return None


def _stop(request: LockRequest, live: dict[str, Occupant]) -> bool:
    """Have the holder stop that is of the order of which this message is the newest; whether it was only kept for an
    older message that waits, and is gone.
    """
    is_alone = len(live) <= request.limit
    for found in [it for it in live.values() if request.arrival and it.holder.order == request.arrival.order]:
        if found.holder.pid == 0 and is_alone:
            # As for a free place: others may run beside it, under a higher limit.
            return live.pop(found.owner) is found
        if found.holder.pid and found.holder.superseded_by is None:
            found.holder = replace(found.holder, superseded_by=request.holder.task_id)
    return False
