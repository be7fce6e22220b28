"""Locks on a Redis (6.2 or newer) or Valkey: one server, the master that Sentinels know, or a Cluster.

A lock is taken and freed by one script each, in one round trip. Nothing is repeated by the connections: redis-py's
client would send a `SET NX` again whose reply was lost, and wait up to minutes. Here each try is short, and only what
may be repeated is. Owners and scripts make that everything.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from redis.backoff import FullJitterBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    ConnectionError,
    ReadOnlyError,
    RedisError,
    TimeoutError,
    TryAgainError,
)

from celery_singleton_lock import clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.lease import Done, Heir, Held, Holder, Lease, Mark, Sight, new_owner
from celery_singleton_lock.stores import calls
from celery_singleton_lock.stores.base import Turn
from celery_singleton_lock.stores.bell import RedisBell
from celery_singleton_lock.stores.cluster import Cluster
from celery_singleton_lock.stores.journal import RedisJournal
from celery_singleton_lock.stores.ledger import RedisLedger
from celery_singleton_lock.stores.piped import PipedTurn
from celery_singleton_lock.stores.scan import entries, holds, look, sight
from celery_singleton_lock.stores.server import Server, told
from celery_singleton_lock.stores.stream import TooFewReplicas
from celery_singleton_lock.stores.turn import AskingTurn

T = TypeVar("T")

#: Tries of an acquire or release; with `server.STEP_TIMEOUT` a hung server costs a few seconds, not minutes.
TRIES = 3

#: Seconds for which a call is repeated while a cluster moves the slot or replaces a master: it refuses scripts with
#: several keys until that is over.
RESHAPING = 4.0

#: Seconds that replicas get at most to have a lock.
REPLICATION = 0.5


class RedisStore:
    """A `Store` on one server or cluster.

    Args:
        servers: where the locks are.
        shown: where that is, for messages.
        replicas: how many replicas must have a lock before it counts as taken.
    """

    def __init__(self, servers: Server | Cluster, shown: str, *, replicas: int = 0) -> None:
        self.server = shown
        self._servers = servers
        self._replicas = (replicas, min(REPLICATION, servers.step / 2)) if replicas else None

    def acquire(
        self,
        key: str,
        owner: str,
        *,
        ttl: float,
        holder: Holder,
        waiting: bool = False,
        once: bool = False,
        limit: int = 1,
    ) -> Lease | Held | Done:
        call = calls.acquire(
            *(key, owner),
            ttl=ttl,
            holder=holder,
            waiting=waiting,
            once=once,
            slots=range(limit),
            replicas=self._replicas,
        )

        def attempt() -> Lease | Held | Done:
            sent_at = clock.now()
            found = calls.found(
                self._run(call),
                lambda fence, slot: Lease(key, owner, ttl=ttl, fence=fence, sent_at=sent_at, limit=limit, slot=slot),
            )
            if isinstance(found, Lease) and clock.now() - sent_at > ttl / 3:
                # Trust counts from sending; what is left of it is too little to start work on.
                raise TimeoutError(f"the answer took longer than a third of the ttl of {ttl:g} s")
            return found

        try:
            return self._patiently(attempt)
        except BaseException as error:
            # Interrupted (a time limit, a shutdown) between sending and reading: it may be ours, and nobody knows.
            if not isinstance(error, LockUnavailable) or isinstance(error.__cause__, TooFewReplicas):
                with suppress(LockUnavailable):
                    self.release(Lease(key, owner, ttl=ttl, fence=0, sent_at=0.0, limit=limit))
            raise

    def renew(self, leases: Sequence[Lease], *, timeout: float) -> list[bool]:
        batches = list(self._batches(leases))
        step = min(timeout, self._servers.step)
        try:
            sent_at, answers = self._renew([calls.renew(batch) for batch in batches], step)
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error
        renewed: dict[Lease, bool] = {}
        for batch, answer in zip(batches, answers, strict=True):
            if not isinstance(answer, Exception):
                renewed.update(zip(batch, calls.renewed(batch, answer), strict=True))
        for lease, ours in renewed.items():
            if ours:
                lease.extend(sent_at)
        for answer in answers:
            if isinstance(answer, Exception):
                raise self._unavailable(answer) from answer
        return [renewed[lease] for lease in leases]

    def release(self, lease: Lease, *, mark: Mark | None = None, heir: Heir | None = None) -> bool:
        call, tries = calls.release(lease, mark=mark, heir=heir), 0

        def attempt() -> bool:
            nonlocal tries
            tries += 1
            released = self._servers.run(call)
            # Gone on a repeated release: the first one worked, and only its reply was lost.
            return bool(released) or tries > 1

        return self._patiently(attempt)

    def bell(self, key: str) -> RedisBell:
        return RedisBell(key, lambda: self._servers.server_of(calls.wake_key(key)), self.server)

    def turn(
        self, key: str, owner: str, *, ttl: float, holder: Holder, since: float, once: bool = False, limit: int = 1
    ) -> Turn:
        if self._replicas is not None:
            return AskingTurn.of(self, key, owner, ttl=ttl, holder=holder, once=once, limit=limit)

        def ask() -> Lease | Held | Done:
            return self.acquire(key, owner, ttl=ttl, holder=holder, waiting=True, once=once, limit=limit)

        place = new_owner()
        behind = calls.queue(key, owner, place, ttl=ttl, holder=holder, once=once, slots=range(limit))

        def granted(fence: int, slot: int, sent_at: float) -> Lease:
            return Lease(key, owner, ttl=ttl, fence=fence, sent_at=sent_at, limit=limit, slot=slot)

        def leave(free: bool) -> None:
            # Where the lock is to be kept, an owner that holds nothing is released. Else the whole value is named, with
            # the holder as it is here: this may be carried out late, when the owner has asked again and got the lock.
            value = owner + holder.dumps(ttl) if free else place
            self._servers.run(calls.leave(granted(0, 0, since), value, place))

        bell = RedisBell(key, lambda: self._servers.server_of(calls.wake_key(key)), self.server, behind)
        return PipedTurn(bell, ask, granted, since=since, leave=leave)

    def look(self, key: str, *, limit: int = 1) -> list[Held]:
        return self._patiently(lambda: look(self._servers.server_of(calls.run_key(key)), key, limit))

    def holds(self, prefix: str) -> Iterator[tuple[str, Held]]:
        try:
            for server in self._servers.servers():
                yield from holds(server, prefix)
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    def sight(self, key: str) -> Sight:
        return self._patiently(lambda: sight(self._servers.server_of(calls.run_key(key)), key))

    def ledger(self, key: str) -> RedisLedger:
        def ask(call: calls.Call) -> list[Any]:
            return [self._patiently(lambda: self._servers.run(call))]

        def known() -> list[bytes]:
            return self._patiently(lambda: [*entries(self._servers.server_of(calls.ledger_key(key)), key)])

        return RedisLedger(key, ask, known, batch=calls.BATCH)

    def journal(self, prefix: str, *, size: int) -> RedisJournal:
        def read(reading: Callable[[Server], T]) -> list[T]:
            return [self._patiently(lambda: reading(self._servers.server_of(calls.journal_key(prefix, "counts"))))]

        return RedisJournal(prefix, size, lambda call: self._patiently(lambda: self._servers.run(call)), read)

    def close(self) -> None:
        self._servers.close()

    def _run(self, call: calls.Call) -> Sequence[Any]:
        """Run an acquire; what too few replicas have does not count as taken, while a refusal does."""
        try:
            answer: Sequence[Any] = self._servers.run(call)
        except TooFewReplicas as few:
            answer = few.answer
            if answer[0] == 1:
                raise
        return answer

    def _batches(self, leases: Sequence[Lease]) -> Iterator[list[Lease]]:
        """Leases that can be renewed in one call."""
        by_slot: defaultdict[int, list[Lease]] = defaultdict(list)
        for lease in leases:
            by_slot[self._servers.slot_of(calls.run_key(lease.key))].append(lease)
        for group in by_slot.values():
            for start in range(0, len(group), calls.BATCH):
                yield group[start : start + calls.BATCH]

    def _renew(self, renewals: Sequence[calls.Call], step: float) -> tuple[float, list[Any]]:
        """When it was sent, and the answers."""
        sent_at = clock.now()
        try:
            return sent_at, self._servers.run_each(renewals, step=step)
        except ConnectionError:
            # The connection was broken, which says nothing about the server: a new one is opened for this.
            sent_at = clock.now()
            return sent_at, self._servers.run_each(renewals, step=step)

    def _patiently(self, attempt: Callable[[], T]) -> T:
        """Run `attempt`, again if the server did not answer, and say so if it never does."""
        began, failures = clock.now(), 0
        while True:
            try:
                return attempt()
            except (RedisError, OSError) as error:
                failures += 1
                if not _is_worth_another_try(error, failures, clock.now() - began):
                    raise self._unavailable(error) from error
            clock.sleep(_BACKOFF.compute(failures))

    def _unavailable(self, error: BaseException) -> LockUnavailable:
        return LockUnavailable(self.server, told(error))


_BACKOFF = FullJitterBackoff(cap=0.5, base=0.02)

#: Errors after which the same command may succeed. READONLY: a failover is under way, reconnect.
_TRANSIENT = (ConnectionError, TimeoutError, ReadOnlyError, OSError)

#: Those that end when a slot has moved, or a replica has taken over.
_RESHAPING = (ClusterDownError, TryAgainError)


def _is_worth_another_try(error: Exception, failures: int, seconds: float) -> bool:
    if isinstance(error, (AuthenticationError, AuthorizationError)):
        return False  # A wrong password is not a matter of patience.
    if isinstance(error, _RESHAPING):
        return seconds < RESHAPING
    return isinstance(error, _TRANSIENT) and failures < TRIES
