"""The end of an execution that meets a held lock, as `on_conflict` says.

Everything here ends the execution by raising what Celery understands. Nobody waits forever afterwards: either a refused
execution gets a final state, and so do its chain's later steps and its chord, or its message goes back to the queue
under the same id. A conflict never spends the task's own retries.

A message that has begun is never refused, whatever the policy: half of its work may be done. It waits.
"""

from __future__ import annotations

import logging
from typing import NoReturn

import celery
from celery import states
from celery.exceptions import Ignore, Reject, TaskRevokedError
from celery.utils import uuid
from celery.utils.log import get_logger

from celery_singleton_lock import signals
from celery_singleton_lock._celery import record_end
from celery_singleton_lock.errors import LockConflict, LockSuperseded
from celery_singleton_lock.options.rules import NEWEST_POLICIES, POLICIES, WAITING_POLICIES, ConflictPolicy
from celery_singleton_lock.options.task import Options, chosen_policy
from celery_singleton_lock.task import decide, requeue
from celery_singleton_lock.task.ends import ignores_result
from celery_singleton_lock.task.message import TaskLike, Waits
from celery_singleton_lock.task.turn import message_of, named

logger = get_logger(__name__)

#: Since this version Celery records a failure itself when a task rejects its message for good.
_RECORDS_REJECTED = celery.VERSION[:2] >= (5, 7)


#: What a callable may choose.
_CHOSEN = tuple(policy for policy in POLICIES if policy not in NEWEST_POLICIES)


class Skipped(Ignore):
    """Ends an execution that is recorded as revoked."""


class Expired(Skipped):
    """Ends a message that came too late, as the worker would have done."""


class RejectedCopy(Ignore):
    """Has the worker reject a message whose id, and so whose result, is the holder's, without storing a failure."""


def policy_for(task: TaskLike, conflict: LockConflict, options: Options) -> ConflictPolicy:
    """The policy for an execution that lost to another task.

    Raises:
        InvalidOption: the user's callable did not return a policy.
    """
    message, acks_late = message_of(task.request), task.acks_late
    chosen: ConflictPolicy = "retry"
    if decide.may_be_refused(message, options, acks_late=acks_late):
        chosen = chosen_policy("on_conflict", options.on_conflict, task, conflict, _CHOSEN)
    return decide.policy_for(message, options, chosen, acks_late=acks_late, is_eager=task.request.is_eager)


def end(
    task: TaskLike,
    conflict: LockConflict,
    policy: ConflictPolicy,
    options: Options,
    *,
    carried: requeue.Carried = requeue.AS_BEFORE,
) -> NoReturn:
    """End the execution that lost to another task; `carried`: what its copy has to know, if it is put back."""
    # A copy that looks again and again says so once.
    level = logging.DEBUG if message_of(task.request).put_back_count("conflict") else logging.INFO
    logger.log(level, "%s on_conflict=%s: %s", named(task), policy, conflict)
    signals.lock_conflict.send(sender=task, task_id=task.request.id, key=conflict.key, conflict=conflict, policy=policy)
    if policy in WAITING_POLICIES:
        # A copy in line is held for long, and asks less often than a limit on the number of tries assumes.
        message = message_of(task.request)
        is_bounded = decide.bound_of(message, options, policy, acks_late=task.acks_late) is not None
        waits = None if is_bounded else Waits(conflict.key, options.limit)
        requeue.put_back(task, reason="conflict", carried=carried._replace(waits=waits))
    elif policy == "raise":
        fail(task, conflict, conflict)
    elif policy == "reject":
        _reject(task, conflict)
    else:
        _skip(task, conflict)


def fail(task: TaskLike, error: Exception, met: LockConflict | None) -> NoReturn:
    """End the execution with `error`; under a new id if the task that it `met` has its id, and so its result."""
    if met is None or not _shares_id(task, met):
        raise error
    _record(task, error, states.FAILURE, task_id=uuid())
    raise Ignore(str(error))


def supersede(task: TaskLike, error: LockSuperseded, met: LockConflict | None) -> NoReturn:
    """End an execution that a newer one supersedes; `met`: the task that has the lock meanwhile, if any."""
    is_shared = (met is not None and _shares_id(task, met)) or error.task_id == task.request.id
    _record(task, error, states.REVOKED, task_id=uuid() if is_shared else None)
    raise Ignore(str(error)) if is_shared else Skipped(str(error))


def revoke(task: TaskLike, why: Ignore) -> NoReturn:
    if not task.request.is_eager:
        # A bare Ignore would leave chains and chords waiting forever.
        _record(task, TaskRevokedError(str(why)), states.REVOKED)
    raise why


def reject(task: TaskLike, error: Exception) -> NoReturn:
    """Fail, and have the broker drop the message, or dead-letter it."""
    if not _RECORDS_REJECTED and not task.request.is_eager:
        _record(task, error, states.FAILURE)
    raise Reject(str(error), requeue=False)


def _reject(task: TaskLike, conflict: LockConflict) -> NoReturn:
    if _shares_id(task, conflict):
        _record(task, conflict, states.FAILURE, task_id=uuid())
        raise RejectedCopy(str(conflict))
    reject(task, conflict)


def _skip(task: TaskLike, conflict: LockConflict) -> NoReturn:
    if not _shares_id(task, conflict):
        revoke(task, Skipped(f"skipped: {conflict}"))
    _record(task, TaskRevokedError(f"skipped: {conflict}"), states.REVOKED, task_id=uuid())
    raise Ignore(f"skipped: {conflict}")


def _shares_id(task: TaskLike, conflict: LockConflict) -> bool:
    """Whether the task that holds the lock has this one's id, and so its result: only the holder may write that."""
    return conflict.task_id is not None and conflict.task_id == task.request.id and not task.request.is_eager


def _record(task: TaskLike, error: Exception, state: str, *, task_id: str | None = None) -> None:
    """Give a final state to the execution, under its own id or another, and so to the rest of its chain and its part in
    a chord.

    Celery ends the rest of a chain only if it stores a result for this step, so we store one even if it is ignored.
    """
    request = task.request
    if request.id is None:
        return
    record_end(
        task.backend,
        task_id or request.id,
        error,
        request,
        state=state,
        store_result=bool(request.chain) or not ignores_result(task, request),
        call_errbacks=state == states.FAILURE,
    )
