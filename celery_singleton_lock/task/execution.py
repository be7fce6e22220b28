"""One execution of a task: acquire → run → release.

A copy of a message that was carried out ends as that did (`done`); one of a message that is being carried out stands
by, where it is the last one. Whatever happens between two of these lines, the lock is freed: by the `finally` here; or,
where that is torn down as well, by the worker's main process, or by the end of the lease, since the heartbeat forgets a
lease that nobody refers to any more.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, NoReturn

from celery import states
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import task_postrun
from celery.utils.dispatch import Signal
from celery.utils.log import get_logger
from celery.utils.time import get_exponential_backoff_interval, maybe_make_aware

from celery_singleton_lock import (
    cleaned,
    clock,
    process_identity,
    signals,
    trust,
)
from celery_singleton_lock.errors import Aborted, LockConflict, LockLost, LockUnavailable, SingletonLockError
from celery_singleton_lock.holder import FIRST, Holder, new_owner, stem
from celery_singleton_lock.journal_entry import (
    LOST,
    NOBODY,
    SCHEDULED_HEADER,
    STOPPED,
    Blocker,
    Entry,
    Kind,
    Place,
    Run,
    Times,
)
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.options.rules import ConflictPolicy
from celery_singleton_lock.options.task import Options
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import Held, LockRequest, Record, Reservation
from celery_singleton_lock.task import (
    key_report,
    message_identity,
    on_conflict,
    redelivery,
    requeue,
)
from celery_singleton_lock.task.abort import Body
from celery_singleton_lock.task.redelivery import Outcome

logger = get_logger(__name__)

#: Seconds that a retry waits for its own previous attempt, which sent it a moment before it freed the lock.
OWN_RETRY_WAIT = 5.0

#: Seconds after the end of a lease at which the put-back copy of a running message is due.
AFTER_LEASE = 1.0

#: Seconds for which it is known of a message that it was refused, where no broker can deliver it again later.
BRIEFLY = 60.0

#: Where a request keeps the owner that the worker's main process gave this delivery: in what the transport says about
#: it, which no sender can write, and which no retry takes along.
OWNER = "singleton_owner"


class _Running(threading.local):
    """Owners under which this thread runs bodies, one inside the other: to wait for them would be to wait for ever."""

    def __init__(self) -> None:
        self.owners: list[str] = []


_running = _Running()


def is_nested() -> bool:
    """Whether this thread is within the body of an exclusive task."""
    return bool(_running.owners)


class Execution:
    """One message in the hands of one process, or one eager call.

    Args:
        task: the task; its `request` is that of this execution.
        runtime: of the task's app.
        options: of this execution.
        key: of its lock.
    """

    def __init__(self, task: Any, runtime: Runtime, options: Options, key: str) -> None:
        self._task = task
        self._request = task.request
        self._store = runtime.store
        self._heartbeat = runtime.heartbeat
        self._journal = runtime.journal
        self._settling = runtime.record_writer
        self._done_ttl = runtime.settings.done_ttl
        self._options = options
        self._key = key
        self._owner = (self._request.delivery_info or {}).get(OWNER) or new_owner()
        self._given_up = requeue.given_up(self._request)
        #: The owner, once it has waited in a queue: what it leaves there may still be carried out for a moment.
        self._left: str | None = None
        self._holder = holder_of(self._task, self._request)
        self._began = clock.now()
        self._loss_told = False
        #: Whether what cleans up after the body is sure to.
        self._is_under_way = False
        #: Whether the body has failed without its lock.
        self._was_lost = False

    def __str__(self) -> str:
        return f"task {self._task.name}[{cleaned.text(self._request.id)}]"

    def carry_out(self, body: Callable[[], Any]) -> Any:
        """Run `body` under the lock, or end as this message must.

        Raises:
            Ignore, Reject, LockConflict: as `on_conflict` says.
            LockUnavailable: with `on_unavailable="raise"`.
            LockLost: the lease was lost and the body was stopped.
        """
        try:
            found = self._found()
            if isinstance(found, Lease):
                self._drop_if_expired(found)
        except Exception as error:  # noqa: BLE001 - a soft time limit while it waits, say
            return self._fail(error)
        if found is None:
            record_started(self._task)
            return body()
        if not isinstance(found, Lease):
            return self._end(found)
        try:
            return self._run(found, body)
        except Exception as error:
            if not self._is_under_way:  # Interrupted before the first line that cleans up.
                return self._fail(error)
            if self._was_lost:
                return self._fail_lost(error)
            raise

    def _found(self) -> Lease | Held | Record | None:
        """What the lock server says of the lock; None to run without one, where it says nothing.

        What was asked for may still be granted, when the server goes on: it is given up, here and by the copy.
        """
        failures = 0
        while True:
            try:
                return self._ask_until_free()
            except LockUnavailable as error:
                self._store.abandon(self._hold())
                if self._options.on_unavailable == "run":
                    logger.warning("%s runs without a lock: %s", self, error)
                    return None
                if self._options.on_unavailable == "raise" or self._request.is_eager:
                    raise
                logger.warning("%s is put back: %s", self, error)
                requeue.try_to_put_back(self._task, reason="unavailable", given_up=self._owner)
            # Neither the lock server nor the broker answers: the message waits here, where it is not lost.
            self._ask_as_another()
            clock.sleep(requeue.back_off(failures, at_most=requeue.MAX_DELAY["unavailable"]))
            failures += 1

    def _ask_as_another(self) -> None:
        """Ask under another owner from now on: a copy that may be on its way takes for free what this one has."""
        self._given_up = (*self._given_up, self._owner)
        self._owner, self._left = new_owner(), None
        delivered_as = (self._request.delivery_info or {}).get(OWNER)
        if delivered_as is not None:
            ttl, limit = self._options.ttl, self._options.limit
            key_report.report(delivered_as, self._key, ttl=ttl, limit=limit, asks_as=self._owner)

    def _put_back_for(self, error: LockUnavailable) -> NoReturn:
        logger.warning("%s is put back: %s", self, error)
        requeue.put_back(self._task, reason="unavailable", given_up=self._owner)

    def _end(self, found: Held | Record) -> Any:
        """End as a copy of a message that is, or was, carried out; or as one that another task refuses."""
        if isinstance(found, Held) and not self._is_copy(found):
            met = found.conflict(self._key)
            try:
                policy = on_conflict.policy_for(self._task, met, self._options)
            except Exception as error:  # noqa: BLE001 - it is the user's
                return self._fail(error, met)
            try:
                found = self._end_refused(policy, met, found.holder)
            except LockConflict:
                raise
            except Exception as error:  # noqa: BLE001 - a soft time limit, say
                return self._fail(error, met)
        return self._end_as_copy(found)

    def _end_refused(self, policy: ConflictPolicy, met: LockConflict, holder: Holder | None) -> Held | Record:
        """End as one that another task refuses; what a copy of it does or did, if there is one."""
        copy = self._refused(policy, met)
        if copy is None:
            self._tell(policy, holder)
            on_conflict.settle(self._task, met, policy, given_up=self._left)
        return copy

    def _fail(self, error: Exception, met: LockConflict | None = None) -> Any:
        """Fail before the body has begun, which is the message's end unless a copy of it carries it out."""
        if isinstance(error, (Ignore, Reject, Retry, LockUnavailable)):
            raise error
        self._store.abandon(self._hold())  # Interrupted, it may have got it.
        copy = self._refused("raise", error)
        if copy is None:
            on_conflict.fail(self._task, error, met)
        return self._end_as_copy(copy)

    def _fail_lost(self, lost: Exception) -> Any:
        """Fail without the lock, which is the message's end unless a copy of it has that by now."""
        try:
            copy = self._refused_by_store("raise", lost)
        except LockUnavailable:
            raise lost from None  # Whether a copy carries it out, nobody can tell.
        if copy is None:
            raise lost
        return self._end_as_copy(copy)

    def _end_as_copy(self, found: Held | Record) -> Any:
        """End as a copy of a message that is, or was, carried out."""
        try:
            if isinstance(found, Held):
                self._stand_by(found)
            end = self._told_again(found)
        except Ignore:
            raise
        except Exception as error:  # noqa: BLE001 - a soft time limit, say
            # Celery would store it as the end of a message that runs, or has ended.
            logger.warning("%s is a copy, and is put back: %r", self, error)
            requeue.put_back(self._task, reason="copy", delay=redelivery.SETTLING, given_up=self._left)
        if end.error is not None:
            raise end.error
        return end.value

    def _told_again(self, found: Record) -> redelivery.End:
        """What the first copy ended with, which settles the message; unless this one only looks, or looks later."""
        self._tell("repeat", None)
        outcome, _ = redelivery.loads(found)
        try:
            end = redelivery.answer(self._task, found, self._left)
        except on_conflict.Skipped:  # It was revoked, which is stored again.
            self._settle_after(outcome)
            raise
        self._settle_after(outcome)
        return end

    def _refused(self, policy: ConflictPolicy, error: Exception) -> Held | Record | None:
        """Record that this message will never be carried out; what another copy of it does or did, if there is one.

        Without the record a copy that waits for the lock meanwhile would be carried out after all.
        """
        if policy in ("retry", "reject"):
            return None  # Its message is not at its end: a dead-letter exchange may send it again on purpose.
        try:
            return self._refused_by_store(policy, error)
        except LockUnavailable as silent:
            self._put_back_for(silent)

    def _refused_by_store(self, policy: ConflictPolicy, error: Exception) -> Held | Record | None:
        outcome = redelivery.refused(self._task, self._request, policy, error) if self._is_remembered else None
        if outcome is None:
            return None
        record, limit = record_of(self._holder, outcome, self._refusal_ttl), self._options.limit
        copy = self._store.refuse(self._key, self._holder, record, limit=limit)
        if isinstance(copy, Held) and self._is_own(copy):
            self._store.abandon(copy.hold(self._key, ttl=self._options.ttl, limit=limit))
            copy = self._store.refuse(self._key, self._holder, record, limit=limit)
            if isinstance(copy, Held) and self._is_own(copy):
                raise LockUnavailable(self._store.server, "the hold of a message that ends could not be freed")
        if copy is None:
            self._settle_after(outcome, record.seconds)
        return copy

    def _is_own(self, found: Held) -> bool:
        """Whether nobody runs under this hold but this delivery: it has it, or it was kept for its message, or a
        delivery before gave it up.
        """
        own = (self._owner, *self._given_up, self._holder.reserved_as)
        return stem(found.owner) in {stem(owner) for owner in own}

    @property
    def _refusal_ttl(self) -> float:
        """Seconds: a message that was acknowledged as it came has copies only if these are on their way already."""
        request = self._request
        redelivered = (request.delivery_info or {}).get("redelivered")
        return self._done_ttl if self._task.acks_late or redelivered or request.eta else min(self._done_ttl, BRIEFLY)

    def _run(self, lease: Lease, body: Callable[[], Any]) -> Any:
        """Run `body` under `lease`: renewed meanwhile, freed afterwards."""
        self._lease, self._body = lease, Body(lease)
        outcome: Outcome | None = None
        reservation: Reservation | None = None
        # Not the lease's own beginning: that is when it is trusted from, which for a waiter is its last look.
        self._ran_at = clock.now()
        try:
            self._is_under_way = True
            self._request.singleton_lease = lease
            _running.owners.append(lease.owner)
            value = self._run_body(body)
            outcome = redelivery.succeeded(self._task, self._request, value)
            return value
        except BaseException as error:
            self._was_lost = self._is_loss(error)
            if not self._was_lost:  # What that left undone, a copy that stands by may do.
                outcome, reservation = redelivery.ended_by(self._task, self._request, error), self._reservation(error)
            raise
        finally:
            try:
                self._heartbeat.stop(lease)
                self._body.end()
            finally:
                with suppress(ValueError):
                    _running.owners.remove(lease.owner)
                ended = clock.now()
                self._free(outcome, reservation)
                self._tell_run(outcome, ended)

    def _run_body(self, body: Callable[[], Any]) -> Any:
        lease = self._lease
        try:
            # In a worker one task follows the other; whoever calls one may look for threads when that is over.
            in_worker = not (self._request.is_eager or self._request.called_directly)
            self._heartbeat.start(lease, self._when_lost, linger=in_worker)
            waited = self._ran_at - self._began
            logger.debug("%s holds %s after %.3f s, fence %d", self, lease.key, waited, lease.fence)
            self._send(signals.lock_acquired, lease=lease, waited=waited)
            record_started(self._task)
            if self._options.on_lock_lost == "abort":
                lease.check()  # The receivers and the result backend may have taken their time.
            with self._body:
                return body()
        except Aborted:
            if not self._body.struck:
                raise
            self._fail_for_loss()

    def _is_loss(self, error: BaseException) -> bool:
        """Whether the body has failed without its lock: stopped for that, or whatever it has made of it."""
        return not self._lease.held and isinstance(error, Exception) and not isinstance(error, (Ignore, Reject, Retry))

    def _drop_if_expired(self, lease: Lease) -> None:
        """A message that was delivered again comes here although it has expired; see `request`."""
        delivered_again = (self._request.delivery_info or {}).get("redelivered")
        if delivered_again and on_conflict.has_expired(self._request):
            outcome = Outcome(states.REVOKED)
            with suppress(LockUnavailable):  # It is repeated until it is answered.
                self._store.free(lease, record=self._record(outcome))
            self._settle_after(outcome)
            on_conflict.expire(self._task)

    def _is_copy(self, found: Held) -> bool:
        """Whether another copy of this message, or another attempt, has the lock."""
        return found.holder is not None and found.holder.is_copy_of(self._holder)

    def _stand_by(self, found: Held) -> NoReturn:
        """This message is being carried out elsewhere; if this is the last copy, keep it in case that worker dies."""
        holder = found.holder or self._holder
        place, own = f"{holder.node} (pid {holder.pid})", self._holder.attempt
        if holder.attempt > own or (holder.attempt == own and not self._task.acks_late):
            # A message that is acknowledged early is not run again when its worker dies: that is Celery's rule.
            logger.info("%s is already running on %s; this copy is dropped", self, place)
            self._tell("drop", holder)
            raise Ignore("already running")
        logger.info("%s is already running on %s; a copy stands by", self, place)
        self._tell("stand-by", holder)
        requeue.put_back(
            self._task, reason="copy", delay=min(found.remaining, self._options.ttl) + AFTER_LEASE, given_up=self._left
        )

    def _ask_until_free(self) -> Lease | Held | Record:
        """Ask for the lock; where it is held, wait as long as `lock_wait` says, and for an own earlier attempt."""
        found = self._ask()
        if not isinstance(found, Held):
            return found
        with self._store.waiter(self._request_for(waiting=True)) as waiter:
            while isinstance(found, Held) and found.owner not in _running.owners:
                if not self._is_left_behind(found):
                    patience = OWN_RETRY_WAIT if self._is_own_earlier_attempt(found) else self._options.wait
                    left = self._began + patience - clock.now()
                    if left <= 0:
                        break
                    self._left = self._owner
                    found = waiter.wait(min(left, trust.seconds_until_over(found.remaining)))
                else:
                    found = waiter.ask()
            return found

    def _request_for(self, *, waiting: bool) -> LockRequest:
        return LockRequest(
            self._key,
            self._owner,
            ttl=self._options.ttl,
            holder=self._holder,
            waiting=waiting,
            once=self._is_remembered,
            limit=self._options.limit,
            given_up=self._given_up,
        )

    def _hold(self) -> Hold:
        """What this delivery may have got, as far as is known without an answer."""
        return Hold(self._key, self._owner, ttl=self._options.ttl, limit=self._options.limit)

    def _ask(self) -> Lease | Held | Record:
        may_wait = self._options.wait > 0 or self._holder.attempt > FIRST
        return self._store.acquire(self._request_for(waiting=may_wait))

    @property
    def _is_remembered(self) -> bool:
        """Whether this is a message of which other copies may come."""
        return self._done_ttl > 0 and self._request.id is not None and not self._request.is_eager

    def _is_left_behind(self, found: Held) -> bool:
        """Free the lock of a process of this host that is provably over; whether that was so."""
        if found.holder is None or not process_identity.is_over(found.holder.process):
            return False
        freed = self._store.free(found.hold(self._key, ttl=self._options.ttl, limit=self._options.limit))
        if freed:
            logger.warning("%s: %s was left behind by a process that is gone; freed", self, self._key)
            self._tell("free", found.holder)
        return freed

    def _is_own_earlier_attempt(self, found: Held) -> bool:
        return found.holder is not None and self._is_copy(found) and found.holder.attempt < self._holder.attempt

    def _reservation(self, error: BaseException) -> Reservation | None:
        """The task's own next attempt, if the lock is to be kept for it."""
        if not (self._options.retain_on_retry and isinstance(error, Retry)) or self._request.is_eager:
            return None
        if not self._is_for_this_lock(error):
            return None
        holder = self._holder
        following = replace(holder, retries=holder.retries + 1, pid=0, process="", since=clock.wall())
        return Reservation(following, seconds_until(error) + self._options.ttl)

    def _is_for_this_lock(self, retry: Retry) -> bool:
        """Whether the next attempt is this message's, and asks for this lock: it may have other arguments."""
        signature: Any = getattr(retry, "sig", None)
        if signature is None or signature.options.get("task_id") != self._request.id:
            return False
        headers = signature.options.get("headers") or {}
        try:
            lock = self._task.lock_of(Context(headers=headers), signature.args, signature.kwargs)
        except SingletonLockError:
            return False
        return lock is not None and lock[1] == self._key

    def _kept_for_nobody(self, outcome: Outcome | None, held: float) -> Reservation | None:
        """What keeps the lock after the end of the task, for the rest of `lock_at_least_for`."""
        left = self._options.at_least_for - held
        if left <= 0 or outcome is None or outcome.state not in (states.SUCCESS, states.FAILURE):
            return None
        # Of no process: nobody may take it for left behind.
        return Reservation(replace(self._holder, pid=0, process=""), left)

    def _when_lost(self) -> None:
        """In the heartbeat's thread, at once when the lease is lost and then until the body ends."""
        if self._options.on_lock_lost == "abort":
            self._body.strike()
        if not self._loss_told:
            self._loss_told = True
            # A receiver may take its time; other leases need the heartbeat's thread meanwhile.
            threading.Thread(target=self._tell_loss, name="singleton-lock-lost", daemon=True).start()

    def _tell_loss(self) -> None:
        lease = self._lease
        logger.error("%s lost %s (%s): %s", self, lease.key, self._options.on_lock_lost, lease.reason)
        self._send(signals.lock_lost, lease=lease, reason=lease.reason)

    def _fail_for_loss(self) -> NoReturn:
        """Fail with LockLost, or retry where the task's autoretry says so: its wrapper is inside, and saw Aborted."""
        task = self._task
        lost = LockLost(self._lease.key, self._lease.reason or "")
        wanted = tuple(getattr(task, "autoretry_for", None) or ())
        unwanted = tuple(getattr(task, "dont_autoretry_for", None) or ())
        if not isinstance(lost, wanted) or isinstance(lost, unwanted):
            raise lost from None
        options = dict(getattr(task, "retry_kwargs", None) or {})
        if factor := getattr(task, "retry_backoff", False):
            options["countdown"] = get_exponential_backoff_interval(
                factor=int(max(1.0, factor)),
                retries=self._request.retries or 0,
                maximum=int(getattr(task, "retry_backoff_max", 600)),
                full_jitter=getattr(task, "retry_jitter", True),
            )
        raise task.retry(exc=lost, **options)

    def _free(self, outcome: Outcome | None, reservation: Reservation | None) -> None:
        lease = self._lease
        if lease.pid != os.getpid():
            return  # Forked by the body: the lock is the parent's.
        held = clock.now() - self._ran_at
        try:
            kept = reservation or self._kept_for_nobody(outcome, held)
            freed = self._store.free(lease, record=self._record(outcome), reservation=kept)
        except LockUnavailable as error:
            logger.warning("%s could not free %s, which ends by itself: %s", self, lease.key, error)
            return
        finally:
            if outcome is not None:
                self._settle_after(outcome)
        if freed:
            logger.debug("%s freed %s after %.3f s", self, lease.key, held)
            self._send(signals.lock_released, lease=lease, held=held)
        elif not self._loss_told:
            lease.lose("it was no longer ours when the task ended")
            self._tell_loss()

    def _tell_run(self, outcome: Outcome | None, ended: float) -> None:
        """Have the journal know of the run: of its body, for others ask for the lock before that and free it after."""
        lease, own = self._lease, self._holder
        if lease.pid != os.getpid():
            return
        state = LOST if lease.reason else STOPPED if outcome is None else outcome.state
        times, run = Times(self._ran_at, ended, self._ran_at - self._began), Run(state, lease.fence, lease.renewals)
        self._journal.add(
            Entry("run", self._task.name, lease.key, own.task_id, Place(own.node, own.pid), times, run, lease.limit),
            at_once=self._request.is_eager,
        )

    def _tell(self, kind: Kind, holder: Holder | None) -> None:
        """Have the journal know of an execution that does not run; `holder`: who has the lock."""
        own = self._holder
        scheduled = cleaned.headers(self._request).get(SCHEDULED_HEADER)
        entry = Entry(
            kind,
            self._task.name,
            self._key,
            own.task_id,
            Place(own.node, own.pid),
            Times(self._began, clock.now(), clock.now() - self._began),
            limit=self._options.limit,
            blocker=NOBODY if holder is None else Blocker(holder.task_id, holder.node, holder.since),
            scheduled=cleaned.text(scheduled) if scheduled else "",
        )
        self._journal.add(entry, at_once=self._request.is_eager)

    def _record(self, outcome: Outcome | None) -> Record | None:
        if outcome is None or not self._is_remembered:
            return None
        return record_of(self._holder, outcome, self._done_ttl)

    def _settle_after(self, outcome: Outcome, seconds: float | None = None) -> None:
        """Have the record, which lives for `seconds`, say that all was sent, when it was."""
        if self._is_remembered and redelivery.needs_settling(self._task, self._request, outcome):
            settled = Outcome(outcome.state, settled=True)
            record = record_of(self._holder, settled, self._done_ttl if seconds is None else seconds)
            self._request.singleton_settle = lambda: self._settle(record)

    def _settle(self, record: Record) -> None:
        """All that follows on the message was sent."""
        if redelivery.can_be_asked(self._task, self._request):
            self._settling.replace(self._key, record)
            return
        with suppress(LockUnavailable):  # At once: nobody else could be asked.
            self._store.replace_records([(self._key, record)])

    def _send(self, signal: Signal, **details: Any) -> None:
        signal.send(sender=self._task, task_id=self._request.id, key=self._key, **details)


def holder_of(task: Any, request: Any) -> Holder:
    """The holder that an execution of this request is, in this process."""
    sending = message_identity.sending_of(request)
    return Holder(
        cleaned.text_or_none(request.id),
        cleaned.count(request.retries),
        cleaned.text_or_none(request.hostname),
        os.getpid(),
        clock.wall(),
        cleaned.count(message_identity.replaced(request)),
        process_identity.own(),
        sending=sending,
        record=message_identity.record_name(task.name, request.id, sending),
    )


def record_of(holder: Holder, outcome: Outcome, seconds: float) -> Record:
    """What to leave behind for `seconds`."""
    return Record(holder.message, outcome.dumps(seconds), seconds)


def seconds_until(retry: Retry) -> float:
    """Seconds from now until a retry is due; an eta without a time zone is UTC, as a worker takes it."""
    due: Any = retry.when
    if isinstance(due, datetime):
        due = maybe_make_aware(due).timestamp() - clock.wall()
    return max(float(due or 0), 0.0)


@task_postrun.connect
def _after_all(sender: Any = None, state: str | None = None, **_: Any) -> None:
    settle = vars(sender.request).get("singleton_settle") if sender is not None else None
    # A message may have a header of this name, but cannot carry a function. Celery sends it from a `finally`: an error
    # that is on its way means that the result was not stored.
    if callable(settle) and sys.exc_info()[0] is None and state in (*states.READY_STATES, states.IGNORED):
        settle()


def record_started(task: Any) -> None:
    """Store STARTED if the task wants that; Celery's own way would do it before the lock is asked for."""
    request = task.request
    if not task.tracks_started or request.is_eager or request.id is None or on_conflict.ignores_result(task, request):
        return
    meta = {"pid": os.getpid(), "hostname": request.hostname}
    task.backend.store_result(request.id, meta, states.STARTED, request=request)
