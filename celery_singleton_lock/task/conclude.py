"""Ends an execution without a run, or one that was cut short, as `decide` says: the only place with effects.

They come in one order: the record at the lock server; signal, journal and log; the state in the result backend; and
then one exception, `Concluded`, or the error of a task that fails. Before a message ends for good, the server may know
of a copy of it: then this delivery ends as a copy. So nobody waits forever: a message that is refused gets a final
state, and so do its chain's later steps and its chord; or it goes back to the queue under the same id, and spends none
of the task's own retries. A message that has begun is never refused, whatever the policy: half of its work may be done.
What interrupts comes too late as soon as it is decided what becomes of the message.

Protocol: `docs/protocol.md`, sections 6 and 8.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import celery
from celery import states
from celery.exceptions import Ignore, Reject, Retry, WorkerLostError
from celery.utils import uuid
from celery.utils.log import get_logger

from celery_singleton_lock import signals
from celery_singleton_lock._celery import counts_part_once
from celery_singleton_lock.errors import LockConflict, LockSuperseded, LockUnavailable, ResultLost
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.options.rules import JOIN, NEWEST_POLICIES, POLICIES, WAITING_POLICIES, ConflictPolicy
from celery_singleton_lock.options.task import chosen_policy
from celery_singleton_lock.stores.base import Held, Record, Superseded
from celery_singleton_lock.task import decide, ends, requeue, sharing
from celery_singleton_lock.task.acquisition import Acquisition
from celery_singleton_lock.task.decide import Decision, Drop, Finish, Report, Wait
from celery_singleton_lock.task.delivery import original_of
from celery_singleton_lock.task.ends import MAX_CONTENT, Concluded, End, Outcome
from celery_singleton_lock.task.interrupt import protect
from celery_singleton_lock.task.message import Waits
from celery_singleton_lock.task.putback import Publisher
from celery_singleton_lock.task.turn import Execution, journal_end, named, settle_after

logger = get_logger(__name__)

#: Since this version Celery records a failure itself when a task rejects its message for good.
_RECORDS_REJECTED = celery.VERSION[:2] >= (5, 7)

#: What a callable may choose.
_CHOSEN = tuple(policy for policy in POLICIES if policy not in NEWEST_POLICIES)


def end(acquisition: Acquisition, found: Held | Record | End) -> Any:
    """Finish a message whose body will not run: it is a redelivery, was refused, or takes another task's result."""
    it = acquisition.execution
    if isinstance(found, End):
        return _report(acquisition, found)
    if isinstance(found, Superseded):
        newer, met = LockSuperseded(it.key, found.by), found.conflict(it.key) if found.owner else None
        decision = decide.superseded(newer, it.request.id, is_shared=_shares_id(it, met))
        say = partial(_say_superseded, it, newer, journaled=found)
        return _conclude(acquisition, decision, say, met)
    if isinstance(found, Record):
        acquisition.leave_line()
    elif not it.is_copy_of(found):
        return _end_refused(acquisition, found)
    return _end_as(acquisition, found)


def with_lease(acquisition: Acquisition, lease: Lease) -> None:
    """End an execution that has the lock, but must not run."""
    it = acquisition.execution
    lost = _returned_too_often(it)
    decision = decide.with_lease(it.message, lost)
    if isinstance(decision, Finish):
        say = partial(_say_rejected, it, lost) if decision.error is lost else _say_nothing
        _conclude(acquisition, decision, say, lease=lease)


def fail(acquisition: Acquisition, error: Exception, met: LockConflict | None = None) -> Any:
    """Fail before the body has begun; that is the message's end unless a copy of it is carried out."""
    if isinstance(error, (Ignore, Reject, Retry, LockUnavailable)):
        raise error
    acquisition.abandon()  # It may have got the lock as it was interrupted.
    decision = Finish(error, states.FAILURE, is_shared=_shares_id(acquisition.execution, met))
    return _end_as(acquisition, _carry_out(acquisition, decision, _say_nothing))


def stopped(acquisition: Acquisition, failure: Exception, newer: LockSuperseded) -> Any:
    """End as a message that ran and was stopped for a newer one; its lock is free. Its body then raised `failure`."""
    it = acquisition.execution

    def say() -> None:
        if not isinstance(failure, LockSuperseded):
            logger.warning("%s was stopped, and failed as it ended: %r", it, failure)
        _say_superseded(it, newer)

    return _conclude(acquisition, decide.superseded(newer, it.request.id), say, has_run=True)


def lost(acquisition: Acquisition, error: Exception) -> Any:
    """Fail without the lock; that is the message's end unless a copy of it has the lock by now."""
    return _conclude(acquisition, Finish(error, states.FAILURE), _say_nothing, has_run=True)


def _conclude(
    acquisition: Acquisition,
    decision: Finish | Report | Wait,
    say: Callable[[], None],
    met: LockConflict | None = None,
    *,
    carried: requeue.Carried = requeue.AS_BEFORE,
    has_run: bool = False,
    lease: Lease | None = None,
) -> Any:
    """Carry out what was decided; if that cannot be done, the message fails, unless it has an end already.

    Args:
        say: tells people, and their programs.
        met: the task that has the lock, if any.
        carried: what the message has to know when it comes again.
        has_run: whether its body has ended: then it does not come again.
        lease: its lease, if it has one.
    """
    try:
        found = _carry_out(acquisition, decision, say, carried=carried, has_run=has_run, lease=lease)
    except Exception as error:  # noqa: BLE001 - whatever a result backend raises
        return fail(acquisition, error, met)
    return _end_as(acquisition, found)


def _carry_out(
    acquisition: Acquisition,
    decision: Finish | Report | Wait,
    say: Callable[[], None],
    *,
    carried: requeue.Carried = requeue.AS_BEFORE,
    has_run: bool = False,
    lease: Lease | None = None,
) -> Held | Record | End:
    """Do it, unless the lock server knows of a copy of the message: then that is returned, and else the end.

    Raises:
        Concluded: the message goes on elsewhere.
    """
    it = acquisition.execution
    protect(it.request)
    if (copy := _record(acquisition, decision, lease, has_run=has_run)) is not None:
        return copy
    say()
    if isinstance(decision, Wait):
        requeue.put_back(it.task, reason=decision.reason, delay=decision.delay, carried=carried)
    if isinstance(decision, Finish):
        return End(error=_report_state(it, decision))
    acquisition.leave_line()
    return decision.end


def _report(acquisition: Acquisition, found: End) -> Any:
    """End as the task that this message had joined."""
    it = acquisition.execution

    def say() -> None:
        logger.info("%s ends as the task that it had joined", it)
        journal_end(it, "joined", None)

    return _conclude(acquisition, Report(found), say)


def _end_refused(acquisition: Acquisition, found: Held) -> Any:
    """End a message that has met another task."""
    it, met = acquisition.execution, found.conflict(acquisition.execution.key)
    message, has_replaced = it.message, it.brought is not None and it.brought.lock.replaces
    waits = decide.must_not_be_refused(message, acks_late=it.task.acks_late, has_replaced=has_replaced)
    try:
        policy: ConflictPolicy = "retry"
        if sharing.is_led_by(acquisition, found):
            policy = JOIN
        else:
            if decide.may_be_refused(message, it.options, waits=waits):
                policy = chosen_policy("on_conflict", it.options.on_conflict, it.task, met, _CHOSEN)
            policy = decide.policy_for(message, it.options, policy, waits=waits, is_eager=it.request.is_eager)
        joins = sharing.joinable(it, found) if policy == JOIN else None
        if policy == JOIN and joins is None:
            policy = "retry" if has_replaced else "raise"
    except Exception as error:  # noqa: BLE001 - it is the user's
        return fail(acquisition, error, met)
    # A copy in line is held for long, and asks less often than a limit on the number of tries assumes.
    is_in_line = decide.bound_of(it.options, policy, waits=waits) is None
    decision = decide.refused(policy, met, is_in_line=is_in_line, is_shared=_shares_id(it, met))
    awaited = Waits(met.key, it.options.limit) if isinstance(decision, Wait) and decision.is_in_line else None
    carried = requeue.Carried(awaited, joins, arrived=found.arrived)
    return _conclude(acquisition, decision, partial(_say_refused, it, found, met, policy), met, carried=carried)


def _end_as(acquisition: Acquisition, found: Held | Record | End) -> Any:
    """End so; or as a copy of a message that is carried out, or has ended, maybe as a task that it had joined."""
    if isinstance(found, End):
        return found.result()
    it = acquisition.execution
    protect(it.request)  # Celery would store what interrupts as the end of a message that runs, or has ended.
    try:
        decided = _beside(it, found) if isinstance(found, Held) else _after(it, found)
        if isinstance(decided, End) and isinstance(decided.error, ResultLost) and _ended_as_another(found):
            # That task may still have what such a record could not keep.
            decided = sharing.end_by_now(acquisition) or decided
    except Exception as error:  # noqa: BLE001 - whatever a result backend raises
        logger.warning("%s is a copy, and is put back: %r", it, error)
        decided = Wait("copy", decide.SETTLING)
    if isinstance(decided, Drop):
        raise Concluded(decided.why, "continues" if decided.goes_on else "over")
    if isinstance(decided, Wait):
        requeue.put_back(it.task, reason=decided.reason, delay=decided.delay)
    return decided.result()


def _beside(execution: Execution, found: Held) -> Drop | Wait:
    """The message is being carried out elsewhere; if this is the last copy, keep it in case that worker dies."""
    holder = found.holder or execution.holder
    lease = min(found.remaining, execution.options.ttl)
    decided = decide.beside_copy(
        execution.holder.attempt, holder.attempt, acks_late=execution.task.acks_late, lease=lease
    )
    is_dropped = isinstance(decided, Drop)
    then = "this copy is dropped" if is_dropped else "a copy waits, in case it dies"
    logger.info("%s is already running on %s; %s", execution, holder.place, then)
    journal_end(execution, "drop" if is_dropped else "stand-by", holder)
    return decided


def _after(execution: Execution, found: Record) -> Drop | Wait | End:
    """The message was carried out: its end, as its record says, unless nothing is left to do, or the first execution
    may still be storing its result. The message then counts as reported.
    """
    journal_end(execution, "repeat", None)
    it, task, request = execution, execution.task, execution.request
    recorded, age = ends.read(found)
    is_over = decide.is_over(recorded, is_awaited=it.is_awaited)
    try:
        # A result that was stored before the body ended, `age` seconds ago, is that of another task with this id.
        asks = not is_over and ends.backend_knows(task, request)
        stored = ends.stored_end(task, request.id, age) if asks else None
    except Exception as error:  # noqa: BLE001 - every backend has its own
        logger.warning("%s: the result backend cannot be read: %r", named(task), error)
        return Wait("copy", decide.SETTLING)
    # Celery counts a part when it has stored it.
    is_part = request.chord is not None and counts_part_once(task.backend)
    decided = decide.after_end(recorded, age, is_awaited=it.is_awaited, is_stored=stored is not None, is_part=is_part)
    if isinstance(decided, Drop):
        state = f"{recorded.state}, settled" if recorded.settled else recorded.state
        logger.info("%s is already done (%s); this copy is dropped", named(task), state)
        return decided
    if isinstance(decided, Wait):
        logger.info("%s is already done; a copy checks later whether its result was stored", named(task))
        return decided
    missing = "it is not known whether its chord counted it" if stored else "its result was not stored"
    logger.warning(
        "%s is already done (%s), but %s; its recorded end is reported again", named(task), recorded.state, missing
    )
    kept = ends.end_of(recorded)
    if recorded.state == states.REVOKED:
        kept = End(error=_report_state(it, decide.revoked_before(kept and kept.error, request.id)))
    elif stored is not None:
        kept = _stored_end(it, stored)
    elif kept is None:
        kept = End(error=ResultLost(task.name, request.id, MAX_CONTENT))
    settle_after(it, recorded)
    return kept


def _ended_as_another(found: Held | Record) -> bool:
    """Whether a message has ended as a task that it had joined."""
    return isinstance(found, Record) and bool(ends.read(found)[0].mark)


def _stored_end(execution: Execution, stored: Mapping[str, Any]) -> End:
    """The end as the result backend has it, for the chord alone to count."""
    if stored["status"] in states.EXCEPTION_STATES:
        return End(error=stored["result"])
    # Celery sends these before it stores a value: they have been sent.
    execution.request.callbacks = execution.request.chain = None
    return End(stored["result"])


def _returned_too_often(execution: Execution) -> WorkerLostError | None:
    """What to end a message with that has cost so many workers that its broker would dead-letter it; None for others.

    The broker counts that of each copy anew. As long as an earlier delivery may be running, there is no lease.
    """
    task, request = execution.task, execution.request
    if not (execution.message.was_put_back and task.acks_late):
        return None
    count, original = requeue.returned(request), original_of(request)
    if original is None or count <= original.returned:
        return None  # The broker itself has counted all of it.
    limit = Publisher.of(task.app).delivery_limit(original.queue)
    if count <= limit:
        return None
    return WorkerLostError(f"{count} workers that had the message are gone; the limit of its queue is {limit:g}")


def _record(
    acquisition: Acquisition, decision: Decision, lease: Lease | None, *, has_run: bool
) -> Held | Record | None:
    """Record that the message ends, if it does; what another copy of it does or did, as far as is known.

    Raises:
        Concluded: the lock server is silent, and the message, which has not run, was put back.
    """
    it, store = acquisition.execution, acquisition.execution.runtime.store
    ended = _outcome(it, decision)
    record, copy = it.record(ended), None
    try:
        if lease is not None:
            with suppress(LockUnavailable):  # It is repeated until it is answered.
                store.free(lease, record=record)
        elif record is not None:
            copy = store.refuse(it.key, it.holder, record)
            if isinstance(copy, Held) and acquisition.is_own(copy):
                store.abandon(it.hold_of(copy))
                copy = store.refuse(it.key, it.holder, record)
                if isinstance(copy, Held) and acquisition.is_own(copy):
                    raise LockUnavailable(store.server, "the hold of a message that ends could not be freed")
    except LockUnavailable as silent:
        if not has_run:
            acquisition.put_back(silent)
        if record is not None:
            store.remember(it.key, record)  # Copies that come later do not run.
        return None
    if copy is None and ended is not None:
        settle_after(it, ended)
    return copy


def _outcome(execution: Execution, decision: Decision) -> Outcome | None:
    """What to record of a message that ends; None if it does not end, or a copy of it may run."""
    it = execution
    if isinstance(decision, Finish) and decision.is_remembered:
        if isinstance(decision.error, LockSuperseded) and decision.state == states.REVOKED:
            return ends.superseded(decision.error, is_awaited=it.is_awaited)
        if decision.state == states.REVOKED:
            return Outcome(states.REVOKED)
        return ends.ended_by(it.task, decision.error, is_awaited=it.is_awaited)
    if not isinstance(decision, Report):
        return None
    if (error := decision.end.error) is None:
        found: Outcome | None = ends.succeeded(decision.end.value, is_awaited=it.is_awaited)
    else:
        found = ends.ended_by(it.task, error, is_awaited=it.is_awaited)
    # For one copy alone to record: the copy that records it sends what follows from the value.
    return None if found is None else found._replace(mark=new_owner())


def _report_state(execution: Execution, decision: Finish) -> Exception:
    """Give the message its final state, unless Celery does; what is to be raised."""
    it, error = execution, decision.error
    text, task_id = str(error), uuid() if decision.is_shared else None
    if decision.kind is None and not decision.is_shared:
        return error
    if decision.kind == "rejected" and not decision.is_shared:
        if not _RECORDS_REJECTED:
            ends.report(it.task, error, decision.state)
        return Reject(text, requeue=False)
    ends.report(it.task, error, decision.state, task_id=task_id)
    kind = "over" if decision.is_shared and decision.kind != "rejected" else decision.kind
    return Concluded(text, kind or "over")


def _shares_id(execution: Execution, met: LockConflict | None) -> bool:
    """Whether the task that holds the lock has this one's id, and so its result: only the holder may write that."""
    request = execution.request
    return met is not None and met.task_id is not None and met.task_id == request.id and not request.is_eager


def _say_nothing() -> None:
    pass


def _say_refused(execution: Execution, found: Held, met: LockConflict, policy: ConflictPolicy) -> None:
    it = execution
    # A copy that looks again and again says so once.
    is_again = it.message.put_back_count("conflict") > 0
    if policy not in WAITING_POLICIES or not is_again:
        journal_end(it, policy, found.holder)
    logger.log(logging.DEBUG if is_again else logging.INFO, "%s on_conflict=%s: %s", named(it.task), policy, met)
    signals.lock_conflict.send(sender=it.task, task_id=it.request.id, key=met.key, conflict=met, policy=policy)


def _say_rejected(execution: Execution, lost: Exception) -> None:
    logger.error("%s is rejected: %s", execution, lost)
    journal_end(execution, "reject", None)


def _say_superseded(execution: Execution, newer: LockSuperseded, journaled: Superseded | None = None) -> None:
    it = execution
    logger.info("%s is superseded by task %s: %s", it, newer.task_id, newer.key)
    signals.lock_superseded.send(sender=it.task, task_id=it.request.id, key=newer.key, by=newer.task_id)
    if journaled is not None:
        journal_end(it, "superseded", journaled.holder)
