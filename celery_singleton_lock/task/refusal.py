"""Ends an execution whose body does not run here: another task refuses it, it failed before it began, or it is a copy.

Before a message ends like this for good, that is recorded: a copy may be waiting for the lock.

Protocol: `docs/protocol.md`, section 6.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from celery import states
from celery.exceptions import Ignore, Reject, Retry, WorkerLostError
from celery.utils.log import get_logger

from celery_singleton_lock import signals
from celery_singleton_lock.errors import LockConflict, LockSuperseded, LockUnavailable, ResultLost
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.options.rules import JOIN, WAITING_POLICIES, ConflictPolicy
from celery_singleton_lock.stores.base import Held, Record, Superseded
from celery_singleton_lock.task import (
    ends,
    following,
    joining,
    journal_entries,
    on_conflict,
    redelivery,
    requeue,
)
from celery_singleton_lock.task.acquisition import Acquisition
from celery_singleton_lock.task.delivery import original_of
from celery_singleton_lock.task.ends import End, Outcome
from celery_singleton_lock.task.putback import Publisher
from celery_singleton_lock.task.run import settle_after
from celery_singleton_lock.task.turn import Execution

logger = get_logger(__name__)


def end(acquisition: Acquisition, found: Held | Record | End) -> Any:
    """Finish a message whose body will not run: it is a redelivery, was refused, or takes another task's result."""
    it = acquisition.execution
    if isinstance(found, End):
        return _end_as_joined(acquisition, found)
    if isinstance(found, Superseded):
        return _end_superseded(acquisition, found)
    if isinstance(found, Held) and not it.is_copy_of(found):
        met = found.conflict(it.key)
        try:
            is_led = following.is_led_by(acquisition, found)
            policy = JOIN if is_led else on_conflict.policy_for(it.task, met, it.options)
            joins = joining.joinable(it, found) if policy == JOIN else None
            if policy == JOIN and joins is None:
                policy = "raise"
            ended = None if joins is None else joining.end_by_now(acquisition, joins)
        except Exception as error:  # noqa: BLE001 - it is the user's
            return fail(acquisition, error, met)
        if ended is not None:
            return _end_as_joined(acquisition, ended)
        try:
            copy = _record(acquisition, policy, met)
            if copy is None:
                if policy not in WAITING_POLICIES or not it.message.put_back_count("conflict"):
                    journal_entries.did_not_run(it, policy, found.holder)  # Not each time that a copy looks.
                carried = requeue.Carried(joins=joins, arrived=found.arrived)
                on_conflict.end(it.task, met, policy, it.options, carried=carried)
        except LockConflict:
            raise
        except Exception as error:  # noqa: BLE001 - a soft time limit, say
            return fail(acquisition, error, met)
        found = copy
    if isinstance(found, Record):
        # The server has woken the next copy in the line of this lock; a follower may have waited in its leader's line.
        acquisition.leave_line(it.key)
    return _end_as_copy(acquisition, found)


def _end_as_copy(acquisition: Acquisition, found: Held | Record) -> Any:
    """End as a copy of a message that is, or was, carried out, or has ended as a task that it had joined."""
    it = acquisition.execution
    try:
        return redelivery.end(it, found)
    except ResultLost:
        # The task that it joined may still have what such a record could not keep.
        if isinstance(found, Held) or not ends.read(found)[0].mark:
            raise
        joined = it.message.note.joins
        ended = joining.end_by_now(acquisition, joined) if joined is not None else following.end_by_now(acquisition)
        if ended is None:
            raise
    return ended.result()


def _end_as_joined(acquisition: Acquisition, ended: End) -> Any:
    """End as the task that this message had joined, unless a copy of this message has done so."""
    it = acquisition.execution
    try:
        copy = _record_end(acquisition, _outcome_of(it, ended))
        if copy is None:
            logger.info("%s ends as the task that it had joined", it)
            journal_entries.did_not_run(it, "joined", None)
        acquisition.leave_line()
    except Exception as error:  # noqa: BLE001 - a soft time limit, say
        return fail(acquisition, error)
    return ended.result() if copy is None else _end_as_copy(acquisition, copy)


def _end_superseded(acquisition: Acquisition, found: Superseded) -> Any:
    """End as a message that a newer one supersedes; if a copy of it runs or has ended, end as that copy."""
    it = acquisition.execution
    error, met = LockSuperseded(it.key, found.by), found.conflict(it.key) if found.owner else None
    try:
        copy = _record_end(acquisition, ends.superseded(error, is_awaited=it.is_awaited))
        if copy is None:
            _say_superseded(it, error, found)
            on_conflict.supersede(it.task, error, met)
    except Ignore:
        raise
    except Exception as failure:  # noqa: BLE001 - a soft time limit, say
        return fail(acquisition, failure, met)
    return redelivery.end(it, copy)


def fail(acquisition: Acquisition, error: Exception, met: LockConflict | None = None) -> Any:
    """Fail before the body has begun; that is the message's end unless a copy of it is carried out."""
    if isinstance(error, (Ignore, Reject, Retry, LockUnavailable)):
        raise error
    acquisition.abandon()  # It may have got the lock as it was interrupted.
    copy = _record(acquisition, "raise", error)
    if copy is None:
        on_conflict.fail(acquisition.execution.task, error, met)
    return redelivery.end(acquisition.execution, copy)


def end_stopped(acquisition: Acquisition, failure: Exception, *, why: LockSuperseded) -> Any:
    """End as a message that ran and was stopped for a newer one; its record says so already, and its lock is free.

    Its body then raised `failure`.
    """
    it = acquisition.execution
    try:
        _say_stopped(it, why, failure)
        on_conflict.supersede(it.task, why, None)
    except Ignore:
        raise
    except Exception as interrupted:  # noqa: BLE001 - a soft time limit, say
        return fail(acquisition, interrupted)


def fail_lost(acquisition: Acquisition, lost: Exception) -> Any:
    """Fail without the lock; that is the message's end unless a copy of it has the lock by now."""
    try:
        copy = _record_lost(acquisition, lost)
    except Exception:  # noqa: BLE001 - what interrupts, a soft time limit say, comes once, and too late
        copy = _record_lost(acquisition, lost)
    if copy is None:
        raise lost
    return redelivery.end(acquisition.execution, copy)


def drop_if_expired(execution: Execution, lease: Lease) -> None:
    """End the execution without a run if its message comes too late."""
    if execution.message.comes_too_late():
        revoked = Outcome(states.REVOKED)
        with suppress(LockUnavailable):  # It is repeated until it is answered.
            execution.runtime.store.free(lease, record=execution.record(revoked))
        settle_after(execution, revoked)
        on_conflict.revoke(execution.task, on_conflict.Expired("expired"))


def reject_if_returned_too_often(execution: Execution, lease: Lease) -> None:
    """End the execution without a run if its message has cost so many workers that its broker would dead-letter it.

    The broker counts that of each copy anew. As long as an earlier delivery may be running, there is no lease.
    """
    task, request = execution.task, execution.request
    if not (execution.message.was_put_back and task.acks_late):
        return
    count, original = requeue.returned(request), original_of(request)
    if original is None or count <= original.returned:
        return  # The broker itself has counted all of it.
    limit = Publisher.of(task.app).delivery_limit(original.queue)
    if count <= limit:
        return
    lost = WorkerLostError(f"{count} workers that had the message are gone; the limit of its queue is {limit:g}")
    logger.error("%s is rejected: %s", execution, lost)
    journal_entries.did_not_run(execution, "reject", None)
    with suppress(LockUnavailable):  # It is repeated until it is answered.
        execution.runtime.store.free(lease)
    on_conflict.reject(task, lost)


def _record(acquisition: Acquisition, policy: ConflictPolicy, error: Exception) -> Held | Record | None:
    """Record that this message will never be carried out; what another copy of it does or did, if there is one."""
    if policy == "reject" or policy in WAITING_POLICIES:
        return None  # The message has not ended: a dead-letter exchange may send it again on purpose.
    it = acquisition.execution
    ended = ends.ended_by(it.task, error, is_awaited=it.is_awaited) if policy == "raise" else Outcome(states.REVOKED)
    return _record_end(acquisition, ended)


def _record_lost(acquisition: Acquisition, lost: Exception) -> Held | Record | None:
    """Record a failure without the lock; what a copy of the message does or did, as far as is known."""
    it = acquisition.execution
    ended = ends.ended_by(it.task, lost, is_awaited=it.is_awaited)
    try:
        return _record_at_store(acquisition, ended)
    except LockUnavailable:
        if (record := it.record(ended)) is not None:
            it.runtime.store.remember(it.key, record)  # Copies that come later do not run.
        return None


def _record_end(acquisition: Acquisition, ended: Outcome | None) -> Held | Record | None:
    """Record an end without a run; what another copy of the message does or did, if there is one."""
    try:
        return _record_at_store(acquisition, ended)
    except LockUnavailable as silent:
        acquisition.put_back(silent)


def _record_at_store(acquisition: Acquisition, ended: Outcome | None) -> Held | Record | None:
    it, store = acquisition.execution, acquisition.execution.runtime.store
    record = it.record(ended)
    if ended is None or record is None:
        return None
    copy = store.refuse(it.key, it.holder, record)
    if isinstance(copy, Held) and acquisition.is_own(copy):
        store.abandon(it.hold_of(copy))
        copy = store.refuse(it.key, it.holder, record)
        if isinstance(copy, Held) and acquisition.is_own(copy):
            raise LockUnavailable(store.server, "the hold of a message that ends could not be freed")
    if copy is None:
        settle_after(it, ended)
    return copy


def _outcome_of(execution: Execution, ended: End) -> Outcome | None:
    """The outcome, for one copy alone to record: the copy that records it sends what follows from the value."""
    is_awaited = execution.is_awaited
    if ended.error is None:
        found: Outcome | None = ends.succeeded(ended.value, is_awaited=is_awaited)
    else:
        found = ends.ended_by(execution.task, ended.error, is_awaited=is_awaited)
    return None if found is None else found._replace(mark=new_owner())


def _say_superseded(execution: Execution, error: LockSuperseded, found: Superseded) -> None:
    """Report that an execution that has not run is superseded."""
    _say(execution, error)
    journal_entries.did_not_run(execution, "superseded", found.holder)


def _say_stopped(execution: Execution, error: LockSuperseded, failure: Exception) -> None:
    """Report that an execution that ran was stopped for a newer one; its body then raised `failure`."""
    if not isinstance(failure, LockSuperseded):
        logger.warning("%s was stopped, and failed as it ended: %r", execution, failure)
    _say(execution, error)


def _say(execution: Execution, error: LockSuperseded) -> None:
    logger.info("%s is superseded by task %s: %s", execution, error.task_id, error.key)
    details = {"task_id": execution.request.id, "key": error.key, "by": error.task_id}
    signals.lock_superseded.send(sender=execution.task, **details)
