"""Locks on a Redis (6.2 or newer) or Valkey: one server, the master that Sentinels know, or a Cluster.

A lock is taken and freed by one script each, in one round trip. Nothing is repeated by the connections: redis-py's
client would send a `SET NX` again whose reply was lost, and wait up to minutes. Here each try is short, and only what
may be repeated is. Owners and scripts make that everything. What ends a lock and was not answered is said again later
(see `debts`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from celery.utils.log import get_logger
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    ConnectionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from celery_singleton_lock import chance, clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.lease import Done, Heir, Held, Holder, Lease, Mark, Sight, new_owner
from celery_singleton_lock.stores.base import Turn
from celery_singleton_lock.stores.redis import calls
from celery_singleton_lock.stores.redis.bell import RedisBell
from celery_singleton_lock.stores.redis.cluster import Cluster
from celery_singleton_lock.stores.redis.connection import TooFewReplicas
from celery_singleton_lock.stores.redis.debts import Debts
from celery_singleton_lock.stores.redis.inspect import (
    entries,
    holds,
    look,
    sight,
)
from celery_singleton_lock.stores.redis.journal import RedisJournal
from celery_singleton_lock.stores.redis.ledger import RedisLedger
from celery_singleton_lock.stores.redis.patience import Asking
from celery_singleton_lock.stores.redis.piped import PipedTurn
from celery_singleton_lock.stores.redis.server import (
    STEP_TIMEOUT,
    Reader,
    Server,
    told,
)
from celery_singleton_lock.stores.redis.turn import AskingTurn

T = TypeVar("T")

logger = get_logger(__name__)

#: Tries of an acquire or release; with `server.STEP_TIMEOUT` a hung server costs a few seconds, not minutes.
TRIES = 3

#: Seconds between two tries, about: doubled each time, and at most.
PAUSE, MAX_PAUSE = 0.02, 0.5

#: Seconds for which a waiter goes on asking while it is cut off, as by a restart: what an acquire costs at most on a
#: server that hangs.
PATIENCE = TRIES * STEP_TIMEOUT

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
        self._debts = Debts(self._servers.run_each, shown)

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
        given_up: Sequence[str] = (),
    ) -> Lease | Held | Done:
        asking = Asking(
            *(self._run, key, owner),
            ttl=ttl,
            holder=holder,
            waiting=waiting,
            once=once,
            limit=limit,
            given_up=given_up,
            replicas=self._replicas,
        )
        try:
            return self._patiently(asking.try_once)
        except BaseException as error:
            # It may be ours, or become so; also where it was interrupted (a time limit, a shutdown) between sending and
            # reading. What was refused by a server that answers is taken back now, the rest when it answers.
            answers = not isinstance(error, LockUnavailable) or isinstance(error.__cause__, _ANSWERS)
            self._end(("acquire", key, owner), lambda _: asking.undone(), ttl, at_once=answers)
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
        make, tries = _release_of(lease, mark, heir), 0

        def attempt() -> bool:
            nonlocal tries
            tries += 1
            released = self._servers.run(make(0.0))
            # Gone on a repeated release: the first one worked, and only its reply was lost.
            return bool(released) or tries > 1 or lease.ending

        try:
            return self._patiently(attempt)
        except BaseException:
            lease.ending = True
            worth = max(lease.ttl, mark.seconds if mark is not None else 0.0)
            self._end(("release", lease.key, lease.owner), make, worth, at_once=False)
            raise

    def abandon(self, lease: Lease) -> bool | None:
        name = "acquire", lease.key, lease.owner
        answer = self._end(name, lambda _: calls.abandon(lease), lease.ttl, at_once=not self._debts.is_behind)
        return None if answer is None else bool(answer)

    def leave_mark(self, lease: Lease, mark: Mark) -> None:
        name = "release", lease.key, lease.owner
        self._end(name, _release_of(lease, mark), mark.seconds, at_once=not self._debts.is_behind)

    def refuse(self, key: str, holder: Holder, mark: Mark, *, limit: int = 1) -> Held | Done | None:
        slots = limit

        def attempt() -> Held | Done | None:
            nonlocal slots
            while True:
                try:
                    return calls.refused(self._servers.run(calls.refuse(key, holder, mark, slots=slots)))
                except calls.MoreSlots as more:
                    slots = more.slots

        return self._patiently(attempt)

    def settle(self, marks: Sequence[tuple[str, Mark]]) -> None:
        by_slot: defaultdict[int, list[tuple[str, Mark]]] = defaultdict(list)
        for key, mark in marks:
            by_slot[self._slot_of(key)].append((key, mark))
        batches = [calls.settle(group[at : at + calls.BATCH]) for group in by_slot.values() for at in _starts(group)]

        def attempt() -> None:
            for answer in self._servers.run_each(batches):
                if isinstance(answer, Exception):
                    raise answer

        self._patiently(attempt)

    def bell(self, key: str) -> RedisBell:
        return RedisBell(key, lambda: self._servers.server_of(calls.wake_key(key)), self.server)

    def turn(
        self,
        key: str,
        owner: str,
        *,
        ttl: float,
        holder: Holder,
        once: bool = False,
        limit: int = 1,
        given_up: Sequence[str] = (),
    ) -> Turn:
        asking = Asking(
            *(self._run, key, owner),
            ttl=ttl,
            holder=holder,
            waiting=True,
            once=once,
            limit=limit,
            given_up=given_up,
            replicas=self._replicas,
        )
        place = new_owner()

        def ask() -> Lease | Held | Done:
            return self._patiently(asking.try_once, PATIENCE)

        def confirm(lease: Lease) -> bool:
            def attempt() -> bool:
                sent_at = clock.now()
                (ours,) = calls.renewed([lease], self._servers.run(calls.renew([lease])))
                lease.begin(sent_at)
                return bool(ours) and clock.now() - sent_at < ttl / 3

            return self._patiently(attempt)

        def leave(free: bool) -> None:
            self._end(("turn", key, place), lambda _: asking.undone(place, free=free), ttl, at_once=True)

        if self._replicas is not None:
            return AskingTurn(self.bell(key), ask, leave)
        behind = calls.queue(key, owner, place, ttl=ttl, holder=holder, once=once, limit=limit)
        bell = RedisBell(key, lambda: self._servers.server_of(calls.wake_key(key)), self.server, behind)
        granted = lambda fence, slot: asking.lease(fence=fence, slot=slot)  # noqa: E731
        return PipedTurn(bell, ask, granted, confirm=confirm, leave=leave)

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
        def read(reading: Callable[[Reader], T]) -> list[T]:
            return [self._patiently(lambda: reading(self._servers.server_of(calls.journal_key(prefix, "counts"))))]

        return RedisJournal(prefix, size, lambda call: self._patiently(lambda: self._servers.run(call)), read)

    def close(self) -> None:
        self._servers.close()

    def _end(
        self, name: tuple[str, str, str], make: Callable[[float], calls.Call], seconds: float, *, at_once: bool
    ) -> Any:
        """Say the end of a lock, a question, or a message; its answer, or None where there is none yet. Never raises an
        error.

        Args:
            name: of what has ended.
            make: the call, by the seconds that have gone by.
            seconds: for how long it is worth saying, if that is more than `calls.OVER_TTL`.
            at_once: try it now; else in the background.
        """
        try:
            if at_once:
                return self._servers.run(make(0.0))
        except (RedisError, OSError) as error:
            logger.debug("%s: the end of a lock or a message was not answered: %s", self.server, told(error))
        self._debts.owe(name, make, seconds=max(seconds, calls.OVER_TTL))
        return None

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
            by_slot[self._slot_of(lease.key)].append(lease)
        for group in by_slot.values():
            for start in _starts(group):
                yield group[start : start + calls.BATCH]

    def _slot_of(self, key: str) -> int:
        return self._servers.slot_of(calls.run_key(key))

    def _renew(self, renewals: Sequence[calls.Call], step: float) -> tuple[float, list[Any]]:
        """When it was sent, and the answers."""
        sent_at = clock.now()
        try:
            return sent_at, self._servers.run_each(renewals, step=step)
        except ConnectionError:
            # The connection was broken, which says nothing about the server: a new one is opened for this.
            sent_at = clock.now()
            return sent_at, self._servers.run_each(renewals, step=step)

    def _patiently(self, attempt: Callable[[], T], patience: float = 0.0) -> T:
        """Run `attempt`, again if the server did not answer, and say so if it never does.

        Args:
            attempt: what to run.
            patience: seconds for which it is tried at least, where that is more than `TRIES`.
        """
        began, failures = clock.now(), 0
        while True:
            try:
                return attempt()
            except (RedisError, OSError) as error:
                failures += 1
                if not _is_worth_another_try(error, failures, clock.now() - began, patience):
                    raise self._unavailable(error) from error
            clock.sleep(chance.spread(min(PAUSE * 2**failures, MAX_PAUSE), least=0.0))

    def _unavailable(self, error: BaseException) -> LockUnavailable:
        return LockUnavailable(self.server, told(error))


def _release_of(lease: Lease, mark: Mark | None, heir: Heir | None = None) -> Callable[[float], calls.Call]:
    """What makes the call of a release that begins now, by the seconds for which it has been owed.

    However late that is carried out, what it leaves behind ends when it would have: by the time that is left of a mark
    its reader sees how long ago the body ended.
    """
    began = clock.now()

    def make(owed_for: float) -> calls.Call:
        late = clock.now() - began
        left, kept = mark and mark.after(late), heir and heir.after(late)
        return calls.release(lease, mark=left, heir=kept, repeated=owed_for > 0)

    return make


#: Errors after which the same command may succeed. READONLY: a failover is under way, reconnect.
_TRANSIENT = (ConnectionError, TimeoutError, ReadOnlyError, OSError)

#: Those that end when a slot has moved, or a replica has taken over.
_RESHAPING = (ClusterDownError, TryAgainError)


#: Errors that say that the server answers, now.
_ANSWERS = (ResponseError, TooFewReplicas)


def _is_worth_another_try(error: Exception, failures: int, seconds: float, patience: float) -> bool:
    if isinstance(error, (AuthenticationError, AuthorizationError)):
        return False  # A wrong password is not a matter of patience.
    if isinstance(error, _RESHAPING):
        return seconds < RESHAPING
    return isinstance(error, _TRANSIENT) and (failures < TRIES or seconds < patience)


def _starts(group: Sequence[object]) -> range:
    """Where the parts of it begin that fit into one call."""
    return range(0, len(group), calls.BATCH)
