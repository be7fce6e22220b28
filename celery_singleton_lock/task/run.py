"""A message from its lock to its end: acquire → run → free. The body runs while the lease is renewed.

Whatever happens between two of these steps, the lock is freed: by the `finally` of `Run`; by `conclude`, before that is
reached; or, if these are cut short as well, by the worker's main process, or by the end of the lease, since the
heartbeat forgets a lease that nobody refers to any more.

Protocol: `docs/protocol.md`, section 6.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, NoReturn

from celery import states
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.dispatch import Signal
from celery.utils.log import get_logger
from celery.utils.time import get_exponential_backoff_interval, maybe_make_aware

from celery_singleton_lock import clock, signals
from celery_singleton_lock.errors import Aborted, LockLost, LockSuperseded, LockUnavailable, SingletonLockError
from celery_singleton_lock.heartbeat import GONE
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.options.rules import QUEUE_TTL
from celery_singleton_lock.stores.base import Held, Record, Reservation
from celery_singleton_lock.task import conclude, ends, sharing
from celery_singleton_lock.task.acquisition import Acquisition
from celery_singleton_lock.task.ends import End, Outcome
from celery_singleton_lock.task.interrupt import Body
from celery_singleton_lock.task.message import HEADER, Target
from celery_singleton_lock.task.turn import Execution, journal_run, record_started, settle_after, this_thread

logger = get_logger(__name__)

#: The most seconds between two renewals of a run that newer messages may stop: a renewal says so.
STOPPED_WITHIN = 1.0


def run_under_lock(execution: Execution, body: Callable[[], Any]) -> Any:
    """Run `body` under the lock, or end as this message must.

    Raises:
        Concluded, Reject, LockConflict: as `on_conflict` says, of this message or of a newer one.
        LockUnavailable: with `on_unavailable="raise"`.
        LockLost: the lease was lost and the body was stopped.
    """
    acquisition = Acquisition(execution)
    is_plain = execution.message.is_plain
    run: Run | None = None
    found: Lease | Held | Record | End | None

    def begin() -> Any:
        sharing.wake_followers(acquisition)
        return body()

    try:
        if is_plain:
            found = acquisition.acquire()
        else:
            found = sharing.end_of_leader(acquisition) or sharing.acquire(acquisition)
        if isinstance(found, Lease):
            if not is_plain:
                conclude.with_lease(acquisition, found)
            run = Run(execution, found)
            return run.execute(body if is_plain else begin)
        if _is_known(execution, found):
            sharing.wake_followers(acquisition)
    except Exception as error:
        if run is None or not run.is_under_way:  # A soft time limit, say, before the first line that cleans up.
            return conclude.fail(acquisition, error)
        if run.superseded is not None:
            return conclude.stopped(acquisition, error, run.superseded)
        if run.was_lost:
            return conclude.lost(acquisition, error)
        raise
    if found is None:
        record_started(execution.task)
        return body()
    return conclude.end(acquisition, found)


class Run:
    """One execution under its lease.

    Attributes:
        is_under_way: whether the clean-up after the body is sure to run.
        was_lost: whether the body has failed without its lock.
        superseded: why it has failed, if it was stopped for a newer task.
    """

    def __init__(self, execution: Execution, lease: Lease) -> None:
        self.is_under_way = False
        self.was_lost = False
        self.superseded: LockSuperseded | None = None
        self._execution = execution
        self._lease = lease
        self._body = Body(lease, execution.request)
        # Not the lease's own beginning: from then on it is trusted, which for a waiter is its last look.
        self._began = clock.now()
        self._waited = self._began - execution.began
        if execution.message.was_put_back:
            self._waited += execution.message.note.seconds_in_line(execution.holder.since)

    def execute(self, body: Callable[[], Any]) -> Any:
        """Run `body`; return or raise what it does."""
        it, lease = self._execution, self._lease
        ended: Outcome | None = None
        reservation: Reservation | None = None
        try:
            self.is_under_way = True
            it.turn.lease = lease
            this_thread.owners.append(lease.owner)
            value = self._run_body(body)
            ended = ends.succeeded(value, is_awaited=it.is_awaited)
            return value
        except BaseException as error:
            ended, reservation = self._end_of(error)
            raise
        finally:
            self._clean_up(ended, reservation)

    def _end_of(self, error: BaseException) -> tuple[Outcome | None, Reservation | None]:
        """The end of a body that raised `error`, and the reservation that takes the place of its lock."""
        it, lease = self._execution, self._lease
        self.superseded = self._superseded(error)
        self.was_lost = self.superseded is None and not lease.held and _is_failure(error)
        if self.superseded is not None:
            return ends.superseded(self.superseded, is_awaited=it.is_awaited), None
        if self.was_lost:  # A waiting copy may do what that left undone.
            return None, None
        ended = ends.ended_by(it.task, error, is_awaited=it.is_awaited, is_replaced=it.turn.is_replaced)
        return ended, _for_next_attempt(it, error)

    def _clean_up(self, ended: Outcome | None, reservation: Reservation | None) -> None:
        it, lease = self._execution, self._lease
        try:
            it.runtime.heartbeat.stop(lease)
            self._body.end()
        finally:
            it.turn.body = None  # Its retry may refer to the request.
            if lease.owner in this_thread.owners:
                this_thread.owners.remove(lease.owner)
            self._free(ended, reservation)

    def _run_body(self, body: Callable[[], Any]) -> Any:
        it, lease = self._execution, self._lease
        try:
            it.runtime.heartbeat.start(
                lease,
                self._say_loss,
                stop=self._body.interrupt if it.options.on_lock_lost == "abort" else None,
                every=STOPPED_WITHIN if it.holder.order else math.inf,
            )
            logger.debug("%s holds %s after %.3f s, fence %d", it, lease.key, self._waited, lease.fence)
            if it.is_remembered and it.holder.retries > 0:
                self._record_attempt_before()
            self._send(signals.lock_acquired, lease=lease, waited=self._waited)
            record_started(it.task)
            if it.options.on_lock_lost == "abort":
                lease.check()  # The receivers and the result backend may have taken long.
            it.turn.body = self._body
            with self._body:
                return body()
        except Aborted:
            self._body.end()  # It may have come as the body ended, before `end` had begun.
            if not self._body.interrupted:
                raise
            if self._body.sent is not None:  # It came while that was being raised: too late.
                raise self._body.sent from None
            if lease.reason is None and lease.superseded_by is not None:
                raise LockSuperseded(lease.key, lease.superseded_by) from None
            _fail_for_loss(it, LockLost(lease.key, self._why_lost(), label=it.holder.label))

    def _record_attempt_before(self) -> None:
        """Record that this message's previous attempt is over. That attempt has sent this one, and may have died before
        it could record its end; a copy of it would run its body again.
        """
        it = self._execution
        before = replace(it.holder, retries=it.holder.retries - 1)
        record = Outcome(states.RETRY).record_of(before, it.runtime.settings.done_ttl)
        with suppress(LockUnavailable):
            it.runtime.store.refuse(it.key, before, record)
        self._record_begin()

    def _record_begin(self) -> None:
        """Record since when this attempt has had the lock, for messages that wait for its end. Otherwise, if it died,
        those that have not looked meanwhile would expect it for as long as the previous attempt is remembered.
        """
        it = self._execution
        # Whether anybody waits is not known here: a copy may join as its own call says.
        is_awaited = ends.may_be_followed(it.task, it.runtime.settings, it.options.scope)
        if is_awaited and (own := Target.of(it.holder)) is not None:
            name, seconds = own.name_of_begin(it.task.name), it.runtime.settings.done_ttl
            it.runtime.store.remember(it.key, ends.notice(name, [own.since], seconds))

    def _why_lost(self) -> str:
        """The lease's own reason, unless the store knows that an operator has taken the lock."""
        it, reason = self._execution, self._lease.reason or ""
        if reason == GONE:
            with suppress(LockUnavailable):
                for held in it.runtime.store.held(it.key):
                    if held.holder and held.holder.is_nobody and it.is_copy_of(held):
                        return "an operator has released it (celery control release_lock)"
        return reason

    def _superseded(self, error: BaseException) -> LockSuperseded | None:
        """Why the body has failed, if it was to stop for a newer task: whatever it raised then.

        Also if its lease is overdue since its process was frozen: the newer task keeps its copies from running.
        """
        newer, is_lost = self._lease.superseded_by, self._lease.reason is not None
        if newer is None or not self._body.interrupted or not _is_failure(error):
            return None
        if is_lost and not isinstance(error, LockSuperseded):
            return None
        return LockSuperseded(self._lease.key, newer)

    def _say_loss(self, lease: Lease) -> None:
        it = self._execution
        what = "is stopped" if it.options.on_lock_lost == "abort" else "goes on"
        held = clock.now() - self._began
        why = self._why_lost()
        logger.error("%s has lost its lock %s after %.1f s, and %s: %s", it, lease.key, held, what, why)
        self._send(signals.lock_lost, lease=lease, reason=why)

    def _free(self, ended: Outcome | None, reservation: Reservation | None) -> None:
        it, lease, now = self._execution, self._lease, clock.now()
        if lease.pid != os.getpid():
            return  # Forked by the body: the lock is the parent's.
        held, freed = now - self._began, None
        try:
            if reservation is None and it.options.at_least_for:
                reservation = _for_nobody(it, ended, held)
            freed = it.runtime.store.free(lease, record=it.record(ended), reservation=reservation)
        except LockUnavailable as error:
            level = logging.WARNING if lease.held else logging.DEBUG  # The loss was reported.
            logger.log(level, "%s could not free %s, which expires by itself: %s", it, lease.key, error)
        finally:
            if ended is not None and not ended.settled:
                settle_after(it, ended)
        if ended is not None and it.options.retain_on_retry and it.request.retries:
            # A slow node of a Redlock may keep the lock for this attempt after the others have granted it.
            it.runtime.store.abandon(Hold(lease.key, it.holder.reserved_as, ttl=lease.ttl, limit=lease.limit))
        if freed:
            logger.debug("%s freed %s after %.3f s", it, lease.key, held)
            self._send(signals.lock_released, lease=lease, held=held)
        elif freed is not None:
            if ended is not None:
                # Another message may have the lock: copies that end as this one are in line behind it.
                it.runtime.store.wake(it.key)
            if not lease.is_told:
                lease.lose("it was no longer held when the task ended")
                self._say_loss(lease)
        journal_run(it, lease, ended, waited=self._waited, began=self._began, ended=now)

    def _send(self, signal: Signal, **details: Any) -> None:
        if not signal.receivers:
            return
        it = self._execution
        signal.send(sender=it.task, task_id=it.request.id, key=it.key, **details)


def _is_known(execution: Execution, found: object) -> bool:
    """Whether the lock server knows of the message: how it ended, or that a copy of it runs."""
    return isinstance(found, Record) or (isinstance(found, Held) and execution.is_copy_of(found))


def seconds_until(retry: Retry) -> float:
    """Seconds from now until a retry is due; an eta without a time zone is UTC, as a worker takes it."""
    due: Any = retry.when
    if isinstance(due, datetime):
        due = maybe_make_aware(due).timestamp() - clock.wall()
    return max(float(due or 0), 0.0)


def _is_failure(error: BaseException) -> bool:
    return isinstance(error, Exception) and not isinstance(error, (Ignore, Reject, Retry))


def _for_next_attempt(execution: Execution, error: BaseException) -> Reservation | None:
    """The reservation that keeps the lock for the task's own next attempt, if that is wanted."""
    options = execution.options
    if not (options.retain_on_retry and isinstance(error, Retry)) or execution.request.is_eager:
        return None
    if not _asks_for_this_lock(execution, error):
        return None
    holder = execution.holder
    following = replace(holder, retries=holder.retries + 1, pid=0, process="", since=clock.wall())
    # Nobody renews it until a worker begins with that attempt, whose message may wait in the queue behind others.
    late = max(options.ttl, options.queue_ttl or QUEUE_TTL)
    return Reservation(following, seconds_until(error) + late)


def _asks_for_this_lock(execution: Execution, retry: Retry) -> bool:
    """Whether the next attempt is this message's, and asks for this lock: it may have other arguments."""
    signature: Any = getattr(retry, "sig", None)
    if signature is None or signature.options.get("task_id") != execution.request.id:
        return False
    call = signature.options.get("singleton_lock", execution.message.carried.get("call"))
    try:
        lock = execution.task.lock_of(Context({HEADER: call}), signature.args, signature.kwargs)
    except SingletonLockError:
        return False
    return lock is not None and lock.key == execution.key


def _for_nobody(execution: Execution, ended: Outcome | None, held: float) -> Reservation | None:
    """The reservation that keeps the lock after the end of the task, for the rest of `lock_at_least_for`."""
    left = execution.options.at_least_for - held
    if left <= 0 or ended is None or ended.state not in (states.SUCCESS, states.FAILURE):
        return None
    # It names no process, so that nobody takes it for left behind; and no order, so that no newer message takes it.
    return Reservation(replace(execution.holder, pid=0, process="", order=""), left)


def _fail_for_loss(execution: Execution, lost: LockLost) -> NoReturn:
    """Fail with LockLost, or retry if the task's autoretry says so: its wrapper is inside, and only saw Aborted."""
    task = execution.task
    wanted = tuple(getattr(task, "autoretry_for", None) or ())
    unwanted = tuple(getattr(task, "dont_autoretry_for", None) or ())
    if not isinstance(lost, wanted) or isinstance(lost, unwanted):
        raise lost from None
    options = dict(getattr(task, "retry_kwargs", None) or {})
    if factor := getattr(task, "retry_backoff", False):
        options["countdown"] = get_exponential_backoff_interval(
            factor=int(max(1.0, factor)),
            retries=execution.request.retries or 0,
            maximum=int(getattr(task, "retry_backoff_max", 600)),
            full_jitter=getattr(task, "retry_jitter", True),
        )
    raise task.retry(exc=lost, **options)
