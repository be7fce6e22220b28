"""Locks on a Redis (6.2 or newer) or Valkey: one server, the master that Sentinels know, or a Cluster.

One script takes a lock, and one frees it, in one round trip each. The connections repeat nothing: redis-py's client
would repeat a `SET NX` whose reply was lost, and wait up to minutes. Here each try is short, and only what may be
repeated is; owners and scripts make that everything. A call that ends a lock and was not answered is repeated later
(see `outbox`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from celery.utils.log import get_logger
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from celery_singleton_lock import clock, trust
from celery_singleton_lock.errors import LockUnavailable, WrongLockServer
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.base import Freeing, Held, LockRequest, Record, Reservation
from celery_singleton_lock.stores.redis import keyspace, lock_answers, lock_commands
from celery_singleton_lock.stores.redis.cluster import Cluster
from celery_singleton_lock.stores.redis.common import Answers, CommonStore, Enough
from celery_singleton_lock.stores.redis.connection import NO_ANSWER, alone, unless_error
from celery_singleton_lock.stores.redis.journal import RedisJournal
from celery_singleton_lock.stores.redis.mailbox import RedisMailbox
from celery_singleton_lock.stores.redis.outbox import CallId, Outbox
from celery_singleton_lock.stores.redis.script import TOMBSTONE_TTL, Call, batches
from celery_singleton_lock.stores.redis.server import (
    NAME_THE_CLUSTER,
    OF_A_CLUSTER,
    STEP_TIMEOUT,
    Server,
    is_of_a_cluster,
    words_of,
)

Item = TypeVar("Item")
T = TypeVar("T")

logger = get_logger(__name__)

#: Tries of a call; with `server.STEP_TIMEOUT` a hung server costs a few seconds, not minutes.
TRIES = 3

#: Seconds between two tries, roughly: at first, doubled each time, and at most.
PAUSE, MAX_PAUSE = 0.02, 0.5

#: Seconds after which a call is not tried again: what it costs on a server that hangs. A try on a cluster may ask each
#: node where the lock is. A waiter that is cut off, as by a restart, goes on asking for as long.
PATIENCE = TRIES * STEP_TIMEOUT

#: Seconds for which a call is repeated while a cluster moves the slot or replaces a master: it refuses scripts with
#: several keys until that is over.
RESHAPING = 4.0


class RedisStore(CommonStore):
    """A `Store` on one server or cluster.

    Args:
        servers: where the locks are.
        server: the name of that place, for messages.
    """

    def __init__(self, servers: Server | Cluster, server: str) -> None:
        super().__init__(server, RedisMailbox(servers.server_of, server))
        self._servers = servers
        self._outbox = Outbox(servers)

    def acquire(self, request: LockRequest) -> Lease | Held | Record:
        attempt = partial(self._try, request)
        try:
            try:
                found = attempt()
            except (RedisError, OSError) as error:
                found = self._patiently(attempt, failed=error)
            will_wait = request.waiting and type(found) is Held
            if request.late and request.another is not None and not isinstance(found, Lease) and not will_wait:
                self.abandon(request.hold())
            return found
        except BaseException as error:
            was_refused = isinstance(error.__cause__, lock_answers.GivenUp) and not request.late
            if request.another is None or isinstance(error, WrongLockServer) or was_refused:
                # Nothing is to be undone. (The tombstone of an owner that asks again and again must not be renewed.)
                raise
            # The lock may be held, or will be; also if this was interrupted (a time limit, a shutdown) between sending
            # and reading. If the server answers, this is undone now, otherwise when it answers again.
            answers = not isinstance(error, LockUnavailable) or isinstance(error.__cause__, _ANSWERS)
            call_id = "acquire", request.key, request.owner
            self._end(call_id, lock_commands.abandon(request.hold()), request.ttl, at_once=answers)
            raise

    def free(self, hold: Hold, *, record: Record | None = None, reservation: Reservation | None = None) -> Freeing:
        call: Call | None = None
        try:
            call = lock_commands.free(hold, record=record, reservation=reservation)
            try:
                if self._released(call):
                    return Freeing.NOW
                return Freeing.UNCLEAR if hold.ending else Freeing.NOT_OURS
            except (RedisError, OSError) as error:
                again = partial(self._freed_again, call)
                return self._patiently(again, failed=error)
        except BaseException:  # Or an interruption, before or after the call was made.
            hold.ending = True
            worth = max(hold.ttl, record.seconds if record is not None else 0.0)
            call = call or lock_commands.free(hold, record=record, reservation=reservation)
            self._end(("free", hold.key, hold.owner), call, worth, at_once=False)
            raise

    def abandon(self, hold: Hold) -> bool | None:
        call_id = "acquire", hold.key, hold.owner
        answer = self._end(call_id, lock_commands.abandon(hold), hold.ttl, at_once=not self._outbox)
        return None if answer is None else bool(answer)

    def remember(self, key: str, record: Record) -> None:
        nobodys = Hold.of_nobody(key)
        call = lock_commands.free(nobodys, record=record)
        self._end(("free", key, nobodys.owner), call, record.seconds, at_once=not self._outbox)

    def refuse(self, key: str, holder: Holder, record: Record) -> Held | Record | None:
        call = lock_commands.refuse(key, holder, record)

        def ask() -> Held | Record | None:
            self._outbox.send_those_of(key)
            return lock_answers.parse_refusal(self._servers.run(call), record.message)

        return self._patiently(ask)

    def replace_records(self, records: Sequence[tuple[str, Record]]) -> None:
        calls = [lock_commands.replace_records(batch) for batch in self._batches(records, lambda it: it[0])]

        def attempt() -> None:
            # A release would come after this, with the record that this is to replace.
            for key in {key for key, _ in records}:
                self._outbox.send_those_of(key)
            for answer in self._servers.run_each(calls):
                unless_error(answer)

        self._patiently(attempt)

    def place_of(self, key: str) -> Hashable:
        return self._servers.place_of(keyspace.run_key(key))

    def journal(self, prefix: str, *, size: int) -> RedisJournal:
        def use(used: Callable[[Server], T]) -> list[T]:
            return self._read(used, keyspace.journal_key(prefix, "counts"))

        return RedisJournal(prefix, size, lambda used: use(used)[0], use)

    def close(self) -> None:
        self._servers.close()

    def _try(self, request: LockRequest) -> Lease | Held | Record:
        """Ask once; may be repeated after any error."""
        self._outbox.send_those_of(request.key)
        if request.waiting:
            self.mailbox.enrol(request)
        sent_at, was_late = clock.now(), request.late
        call = lock_commands.acquire(request)
        # Noted before it is sent: an interruption may come between any two lines.
        request.late = True
        answer = self._servers.run(call)
        request.late = was_late
        if request.arrival is not None:
            self._push([answer])
        found = lock_answers.parse_acquired(answer, request, sent_at)
        if isinstance(found, Lease) and not trust.came_in_time(sent_at, request.ttl):
            raise TimeoutError(f"the answer took longer than a third of the ttl of {request.ttl:g} s")
        return found

    def _freed_again(self, call: Call) -> Freeing:
        # Gone when the call is repeated: the first one has worked, and only its reply was lost.
        return Freeing.NOW if self._released(call.again()) else Freeing.UNCLEAR

    def _released(self, call: Call) -> bool:
        """Send the end of a hold, and wake the next waiter; whether it was held."""
        answer = self._servers.run(call)
        if not isinstance(answer, int):
            self._push([answer])
        return bool(answer)

    def _end(self, call_id: CallId, call: Call, seconds: float, *, at_once: bool) -> Any:
        """Send the end of a lock, a question, or a message; its answer, or None if there is none yet. Never raises an
        error.

        Args:
            call_id: identifies `call`.
            call: the call that ends it.
            seconds: for how long it is worth repeating, if that is more than `TOMBSTONE_TTL`.
            at_once: try it now; if False, only in the background.
        """
        repeat = partial(self._outbox.put, call_id, call, max(seconds, TOMBSTONE_TTL))
        try:
            if at_once:
                return self._released(call)
        except (RedisError, OSError) as error:
            logger.debug("%s: a release or the end of a message was not answered: %s", self.server, words_of(error))
        except BaseException:  # An interruption, before or after it was sent.
            repeat()
            raise
        repeat()
        return None

    def _batches(self, items: Sequence[Item], key_of: Callable[[Item], str]) -> Iterator[Sequence[Item]]:
        """The items in groups that can be named in one call."""
        by_slot: defaultdict[int, list[Item]] = defaultdict(list)
        for item in items:
            by_slot[self._servers.slot_of(keyspace.run_key(key_of(item)))].append(item)
        for group in by_slot.values():
            yield from batches(group)

    def _wanted(self, request: LockRequest) -> Lease | Held | Record:
        return self._patiently(partial(self._try, request), PATIENCE)

    def _ask(self, calls: Sequence[Call], enough: Enough, *, step: float | None = None) -> list[Answers]:
        sent_at = clock.now()
        try:
            answers = self._servers.run_each(calls, step=min(step or STEP_TIMEOUT, self._servers.step))
        except (RedisError, OSError) as error:
            answers = [alone(error)] * len(calls)
        return [Answers({0: answer}, sent_at=sent_at) for answer in answers]

    def _unanswered(self, each: Sequence[Answers]) -> LockUnavailable:
        return self._unavailable(next(it for answers in each for it in answers.values() if isinstance(it, Exception)))

    def _majority(self, call: Call, *, of: str = "") -> list[Any]:
        def ask() -> Any:
            self._outbox.send_those_of(of)
            return self._servers.run(call)

        return [self._patiently(ask)]

    def _read(self, reading: Callable[[Server], T], key: str = "") -> list[T]:
        def read() -> list[T]:
            servers = [self._servers.server_of(key)] if key else self._servers.servers()
            return [reading(server) for server in servers]

        return self._patiently(read)

    def _patiently(
        self, attempt: Callable[[], T], patience: float = 0.0, *, failed: RedisError | OSError | None = None
    ) -> T:
        """Run `attempt`, again if the server did not answer; raise `LockUnavailable` if it never does.

        Args:
            attempt: what to run.
            patience: the least seconds for which it is tried, if that takes longer than `TRIES`.
            failed: the error of an earlier try.
        """
        began, failures = clock.now(), 0
        while True:
            try:
                if failed is not None:
                    raise failed
                return attempt()
            except (RedisError, OSError) as error:
                failures, failed = failures + 1, None
                if not _is_worth_another_try(error, failures, clock.now() - began, patience):
                    raise self._unavailable(error) from error
            clock.sleep(clock.spread(min(PAUSE * 2**failures, MAX_PAUSE), least=0.0))

    def _unavailable(self, error: BaseException) -> LockUnavailable:
        if isinstance(self._servers, Server) and is_of_a_cluster(error):
            return WrongLockServer(self.server, f"{words_of(error)}: {OF_A_CLUSTER}; {NAME_THE_CLUSTER}")
        return LockUnavailable(self.server, words_of(error))


#: Errors after which the same command may succeed. READONLY: a failover is under way, reconnect.
_TRANSIENT = (*NO_ANSWER, ReadOnlyError)

#: Errors that end when a slot has moved, or a replica has taken over.
_RESHAPING = (ClusterDownError, TryAgainError)


#: Errors that show that the server answers now.
_ANSWERS = (ResponseError,)


def _is_worth_another_try(error: Exception, failures: int, seconds: float, patience: float) -> bool:
    if isinstance(error, (AuthenticationError, AuthorizationError)):
        return False  # A wrong password is not a matter of patience.
    if isinstance(error, _RESHAPING):
        return seconds < RESHAPING
    return isinstance(error, _TRANSIENT) and seconds < (PATIENCE if failures < TRIES else patience)
