"""The end of a copy of a message that another delivery carries out, or has carried out.

Protocol: `docs/protocol.md`, section 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from celery import states
from celery.exceptions import Ignore
from celery.utils.log import get_logger

from celery_singleton_lock._celery import counts_part_once
from celery_singleton_lock.errors import LockSuperseded, ResultLost
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.task import decide, ends, journal_entries, on_conflict, requeue
from celery_singleton_lock.task.decide import Drop, Wait
from celery_singleton_lock.task.ends import MAX_CONTENT, End, Outcome
from celery_singleton_lock.task.message import TaskLike
from celery_singleton_lock.task.run import settle_after
from celery_singleton_lock.task.turn import Execution, named

logger = get_logger(__name__)


def end(execution: Execution, found: Held | Record) -> Any:
    """End as a copy of a message that is, or was, carried out."""
    try:
        if isinstance(found, Held):
            _stand_by(execution, found)
        ended = _end_again(execution, found)
    except Ignore:
        raise
    except Exception as error:  # noqa: BLE001 - a soft time limit, say
        # Celery would store it as the end of a message that runs, or has ended.
        logger.warning("%s is a copy, and is put back: %r", execution, error)
        requeue.put_back(execution.task, reason="copy", delay=decide.SETTLING)
    return ended.result()


def _stand_by(execution: Execution, found: Held) -> NoReturn:
    """The message is being carried out elsewhere; if this is the last copy, keep it in case that worker dies."""
    holder = found.holder or execution.holder
    lease = min(found.remaining, execution.options.ttl)
    decided = decide.beside_copy(
        execution.holder.attempt, holder.attempt, acks_late=execution.task.acks_late, lease=lease
    )
    if isinstance(decided, Drop):
        logger.info("%s is already running on %s; this copy is dropped", execution, holder.place)
        journal_entries.did_not_run(execution, "drop", holder)
        raise requeue.GoesOn(decided.why)
    logger.info("%s is already running on %s; a copy waits, in case it dies", execution, holder.place)
    journal_entries.did_not_run(execution, "stand-by", holder)
    requeue.put_back(execution.task, reason="copy", delay=decided.delay)


def _end_again(execution: Execution, found: Record) -> End:
    """The recorded end, or what it raises; the message then counts as reported."""
    journal_entries.did_not_run(execution, "repeat", None)
    recorded, _ = ends.read(found)
    try:
        ended = answer(execution.task, found)
    except on_conflict.Skipped:  # It was revoked, which is stored again.
        settle_after(execution, recorded)
        raise
    settle_after(execution, recorded)
    return ended


def answer(task: TaskLike, record: Record) -> End:
    """The end of a copy of a message that was carried out: the same return value or exception.

    Raises:
        Ignore: nothing is left to do, or the copy was put back, since the first execution may still be storing its
            result. It is a `GoesOn` if the message was retried or replaced, and what goes on has the lock that it
            brought, or if the copy was put back.
        Skipped: the first one was revoked, which was recorded again.
    """
    recorded, age = ends.read(record)
    is_awaited = ends.is_awaited(task, task.request)
    stored = None if decide.is_over(recorded, is_awaited=is_awaited) else _stored(task, age)
    # Celery counts a part when it has stored it.
    is_part = task.request.chord is not None and counts_part_once(task.backend)
    decided = decide.after_end(recorded, age, is_awaited=is_awaited, is_stored=stored is not None, is_part=is_part)
    if isinstance(decided, Drop):
        state = f"{recorded.state}, settled" if recorded.settled else recorded.state
        logger.info("%s is already done (%s); this copy is dropped", named(task), state)
        raise (requeue.GoesOn if decided.goes_on else Ignore)(decided.why)
    if isinstance(decided, Wait):
        logger.info("%s is already done; a copy checks later whether its result was stored", named(task))
        requeue.put_back(task, reason="copy", delay=decided.delay)
    missing = "it is not known whether its chord counted it" if stored else "its result was not stored"
    logger.warning(
        "%s is already done (%s), but %s; its recorded end is reported again", named(task), recorded.state, missing
    )
    if recorded.state == states.REVOKED:
        kept = ends.end_of(recorded)
        if kept is not None and isinstance(kept.error, LockSuperseded):
            on_conflict.supersede(task, kept.error, None)
        on_conflict.revoke(task, on_conflict.Skipped("revoked or skipped before"))
    return _recorded_end(task, recorded) if stored is None else _stored_end(task, stored)


def _stored_end(task: TaskLike, stored: Mapping[str, Any]) -> End:
    """The end as the result backend has it, for the chord alone to count."""
    if stored["status"] in states.EXCEPTION_STATES:
        return End(error=stored["result"])
    # Celery sends these before it stores a value: they have been sent.
    task.request.callbacks = task.request.chain = None
    return End(stored["result"])


def _recorded_end(task: TaskLike, recorded: Outcome) -> End:
    """The end as it was recorded; `ResultLost` if it was not kept."""
    if (kept := ends.end_of(recorded)) is not None:
        return kept
    return End(error=ResultLost(task.name, task.request.id, MAX_CONTENT))


def _stored(task: TaskLike, age: float) -> Mapping[str, Any] | None:
    """What the result backend has of the end of this task; None if it has nothing. If it does not answer, a copy waits.

    A result that was stored before the body ended, `age` seconds ago, is that of another task with this id.
    """
    if not ends.backend_knows(task, task.request):
        return None
    try:
        return ends.stored_end(task, task.request.id, age)
    except Exception as error:  # noqa: BLE001 - every backend has its own
        logger.warning("%s: the result backend cannot be read: %r", named(task), error)
        requeue.put_back(task, reason="copy", delay=decide.SETTLING)
