"""Getting the lock: asking for it, waiting for it, and asking again if no answer came.

Protocol: `docs/protocol.md`, sections 2 and 7.
"""

from __future__ import annotations

import os
from typing import NoReturn, TypeGuard

from celery.utils.log import get_logger

from celery_singleton_lock import clock, process_identity, trust
from celery_singleton_lock.errors import InvalidOption, LockUnavailable, WrongLockServer, with_label
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.options.rules import NEWEST_POLICIES, REPLACE
from celery_singleton_lock.stores.base import MAX_GIVEN_UP, Arrival, Held, LockRequest, Record, Superseded
from celery_singleton_lock.task import decide, reports, requeue
from celery_singleton_lock.task.decide import Fail, Run
from celery_singleton_lock.task.turn import Execution, journal_crash, this_thread

logger = get_logger(__name__)

#: Seconds that a retry waits for its own previous attempt, which sent it a moment before it freed the lock.
OWN_RETRY_WAIT = 5.0

#: The least seconds that the order of a key is kept after the last request for its lock: if a worker holds a message
#: and dies, the broker delivers the message again, and it must still be known whether it is the newest.
KNOWN_FOR = 3600.0


class Acquisition:
    """Gets the lock of one execution.

    Raises:
        InvalidOption: this process is none of those that the worker's pool starts.

    Attributes:
        given_up: owners under which this message has asked for its lock before, without an answer.
        has_waited: whether the release of this lock by another message may have woken this one.
    """

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self._store = execution.runtime.store
        self._delivered_as = execution.message.owner
        self._owner = self._delivered_as or new_owner()
        self._outage = execution.runtime.heartbeat.outage
        self._arrival = _arrival_of(execution) if execution.options.on_conflict in NEWEST_POLICIES else None
        self.given_up = execution.message.note.given_up
        self.has_waited = execution.message.note.waits is not None
        self._has_left_line = False
        #: Seconds that it waits in its slot; a copy that has joined another task only looks.
        self._wait = execution.options.wait if execution.message.note.joins is None else 0.0
        #: Whether it can go in a worker's line: then it leaves a free lock to those that have waited for longer. One
        #: that was in line does not: it was its turn, and the clocks of two hosts may differ about that.
        self._gives_way = (
            execution.options.on_conflict == "retry"
            and execution.options.conflict_retries is None
            and execution.message.note.waits is None
            and not execution.request.is_eager
        )
        #: When it began to wait for the lock; an item of a map, which stays here, does not count the server's silence.
        self._asks_since = execution.began
        if not self._report():
            raise InvalidOption(
                f"{execution} got into process {os.getpid()} in a way that this package does not know: the worker's "
                "main process, which renews and frees the locks of its pool, cannot be reached; allowed pools: "
                "-P prefork, threads, gevent, eventlet, solo"
            )

    def acquire(self) -> Lease | Held | Record | None:
        """The lock server's answer; None to run without a lock, if there is no answer.

        Raises:
            Concluded: there is no answer, and the message was put back.
            LockUnavailable: there is no answer, with `on_unavailable="raise"` or in an eager call.
        """
        it, failures = self.execution, 0
        while True:
            try:
                found = self._ask_until_free()
                self._outage.answered(grants=True)
                return found
            except LockUnavailable as error:
                self.abandon()
                self._outage.failed(error, grants=False)
                policy = it.options.on_unavailable
                decision = decide.in_silence(
                    policy, is_eager=it.request.is_eager, is_wrong_server=isinstance(error, WrongLockServer)
                )
                if isinstance(decision, Run):
                    logger.warning("%s runs without a lock: %s", it, error)
                    return None
                if isinstance(decision, Fail):
                    raise
                if decision is None:
                    logger.info("%s waits: %s", it, error)
                else:
                    it.turn.gives_up = self._owner
                    requeue.try_to_put_back(it.task, reason=decision.reason)
            # There is no message to put back; or the broker does not answer either, and the message waits here, where
            # it is not lost.
            self._ask_as_another()
            clock.sleep(requeue.back_off(failures, at_most=requeue.MAX_DELAY["unavailable"]))
            if policy == "wait":
                self._asks_since = clock.now()
            failures += 1

    def abandon(self) -> None:
        """Free the lock that this delivery may have got."""
        self._store.abandon(self._request(waiting=False).hold())

    def put_back(self, error: LockUnavailable) -> NoReturn:
        """End the execution, and put its message back to ask again.

        Raises:
            Concluded: the message was put back.
        """
        self._outage.failed(error, grants=False)
        self.execution.turn.gives_up = self._owner
        requeue.put_back(self.execution.task, reason="unavailable")

    def leave_line(self, *stays: str | None) -> None:
        """Wake the next one in line, once, unless this message keeps waiting for the same lock, or takes it.

        Args:
            stays: the keys of the locks that it waits for, or takes.
        """
        it = self.execution
        waited_for = it.message.note.waits_on(it.runtime.settings.prefix)
        if waited_for is not None and waited_for.key not in stays and not self._has_left_line:
            self._has_left_line = True
            self._store.wake(waited_for.key)

    def is_own(self, found: Held) -> bool:
        """Whether only this delivery can run under this hold: it has the hold, or the hold was kept for its message, or
        an earlier delivery gave it up.
        """
        own = (self._owner, *self.given_up, self.execution.holder.reserved_as)
        return found.owner in own

    def _ask_until_free(self) -> Lease | Held | Record:
        """Ask for the lock; if it is held, wait as long as `lock_wait` says, or for the message's earlier attempt."""
        it = self.execution
        may_wait = self._wait > 0 or bool(it.message.retries or it.message.replaced)
        request = self._request(waiting=may_wait)
        found = self._store.acquire(request)
        if isinstance(found, Lease):
            return found
        if not may_wait:
            while _is_held(found) and self._free_left_behind(found):
                found = self._store.acquire(request)
        if not (may_wait and _is_held(found)):
            return found
        with self._store.waiter(request) as waiter:
            while _is_held(found) and found.owner not in this_thread.owners:
                if not self._free_left_behind(found):
                    patience = OWN_RETRY_WAIT if self._is_own_earlier_attempt(found) else self._wait
                    left = self._asks_since + patience - clock.now()
                    if left <= 0:
                        break
                    self.has_waited = self.has_waited or not it.is_copy_of(found)
                    it.turn.gives_up = self._owner
                    found = waiter.wait(min(left, trust.seconds_until_over(found.remaining)))
                else:
                    found = waiter.ask()
        if _is_held(found) and not found.owner:  # It was left to others, and the time is over.
            found = self._store.acquire(self._request(waiting=False))
        return found

    def _request(self, *, waiting: bool) -> LockRequest:
        it = self.execution
        return LockRequest(
            it.key,
            self._owner,
            ttl=it.options.ttl,
            holder=it.holder,
            waiting=waiting,
            since=it.message.note.since_now() if waiting or self._gives_way else 0.0,
            check_finished=it.is_remembered,
            limit=it.options.limit,
            given_up=self.given_up,
            arrival=self._arrival,
            another=self._ask_as_another,
        )

    def _ask_as_another(self) -> str:
        """Ask under another owner from now on: a copy that may be on its way treats the old owner's lock as free."""
        turn = self.execution.turn
        self.given_up = (*self.given_up, self._owner)[-MAX_GIVEN_UP:]
        self._owner = new_owner()
        turn.gives_up = turn.gives_up and self._owner
        self._report()
        return self._owner

    def _report(self) -> bool:
        """Report to the worker's main process, if there is one, which lock is asked for next; False if that is out of
        reach.
        """
        if (given := self._delivered_as) is None:
            return True
        it, label = self.execution, self.execution.holder.label
        return reports.send(reports.Report(given, it.key, it.options.ttl, it.options.limit, self._owner, label))

    def _free_left_behind(self, found: Held) -> bool:
        """Free the lock of a process of this host that has provably ended; whether it was freed."""
        it = self.execution
        if found.holder is None or not process_identity.is_dead(found.holder.process):
            return False
        freed = bool(self._store.free(it.hold_of(found)))
        if freed:
            logger.warning(
                "%s: the lock was left behind by a process that is gone, and is freed: %s was held by task %s on %s",
                it,
                with_label(it.key, found.holder.label),
                found.holder.task_id,
                found.holder.place,
            )
            journal_crash(it, found)
        return freed

    def _is_own_earlier_attempt(self, found: Held) -> bool:
        it = self.execution
        return it.is_copy_of(found) and found.holder is not None and found.holder.attempt < it.holder.attempt


def _is_held(found: Lease | Held | Record) -> TypeGuard[Held]:
    """Whether somebody else has the lock, and this message may wait for it."""
    return isinstance(found, Held) and not isinstance(found, Superseded)


def _arrival_of(execution: Execution) -> Arrival | None:
    """What its request for the lock says of the order of which only the newest message runs: it gets a number when it
    first asks, in the same round trip. None if it has no place in it: it has another policy, or is not a message, or
    comes too late to run, so that no other is to be stopped for it.

    Protocol: `docs/protocol.md`, section 14.
    """
    policy, request = execution.options.on_conflict, execution.request
    if policy not in NEWEST_POLICIES or request.is_eager or request.id is None or execution.message.comes_too_late():
        return None
    seconds = max(execution.runtime.settings.done_ttl, KNOWN_FOR)
    return Arrival(execution.message.number, seconds, execution.task.name, stops=policy == REPLACE)
