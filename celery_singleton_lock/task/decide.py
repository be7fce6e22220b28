"""What becomes of a message, decided from what its process has found: without effects.

A finding is a lease, a task or a copy of the message that has the lock, a record of the message's end, a newer message,
the end of the message that it is to end as, or silence. `conclude` does what is decided here.

Protocol: `docs/protocol.md`, section 8.
"""

from __future__ import annotations

from typing import NamedTuple

from celery import states
from celery.exceptions import TaskRevokedError

from celery_singleton_lock.errors import LockSuperseded
from celery_singleton_lock.options.rules import JOIN, NEWEST_POLICIES, WAITING_POLICIES, ConflictPolicy
from celery_singleton_lock.options.task import Options
from celery_singleton_lock.task.ends import REPLACED, End, Kind, Outcome
from celery_singleton_lock.task.message import Message, Reason

#: Seconds after the end of the body in which its own process may still be sending callbacks and storing the result.
SETTLING = 10.0

#: Seconds after the end of a lease at which the put-back copy of a running message is due.
AFTER_LEASE = 1.0


class Run(NamedTuple):
    """The body runs, under a lock unless the lock server is silent."""


class Fail(NamedTuple):
    """The error is raised, and Celery makes of it what it makes of any."""


class Finish(NamedTuple):
    """The message ends without a run: its callers get `error`.

    Attributes:
        state: Celery's.
        kind: what the worker's main process is told; None: `error` itself is raised, as that of a task that fails.
        is_shared: whether another task has this one's id, and so its result: this end is stored under a new id.
        is_remembered: whether a copy that comes later ends in the same way. A rejected message may be sent again on
            purpose, by a dead-letter exchange for example.
    """

    error: Exception
    state: str
    kind: Kind | None = None
    is_shared: bool = False
    is_remembered: bool = True


class Drop(NamedTuple):
    """This delivery ends, and nothing is left to do for it.

    Attributes:
        goes_on: whether the message, or its next attempt, or its replacement, has the lock that it brought.
    """

    why: str
    goes_on: bool


class Wait(NamedTuple):
    """The message is put back.

    Attributes:
        reason: why.
        delay: seconds until it comes; None: longer each time that it was put back for this reason.
        is_in_line: whether it waits for its lock in a worker's line, and is woken.
    """

    reason: Reason
    delay: float | None = None
    is_in_line: bool = False


class Report(NamedTuple):
    """The message ends as another one has ended: that end is recorded as its own."""

    end: End


class Repeat(NamedTuple):
    """The message's own end, which is recorded, is reported again."""


Decision = Run | Fail | Finish | Drop | Wait | Report | Repeat


def with_lease(message: Message, returned_too_often: Exception | None) -> Run | Finish:
    """The message has got its lock.

    Args:
        returned_too_often: what to end it with if it has cost so many workers that its broker would dead-letter it.
    """
    if message.comes_too_late():
        return Finish(TaskRevokedError("expired"), states.REVOKED, "expired")
    if returned_too_often is not None:
        return Finish(returned_too_often, states.FAILURE, "rejected", is_remembered=False)
    return Run()


def refused(policy: ConflictPolicy, conflict: Exception, *, is_in_line: bool, is_shared: bool) -> Finish | Wait:
    """Another task has the lock; `policy` is what `policy_for` returned."""
    if policy in WAITING_POLICIES:
        return Wait("conflict", is_in_line=is_in_line)
    if policy == "raise":
        return Finish(conflict, states.FAILURE, is_shared=is_shared)
    if policy == "reject":
        return Finish(conflict, states.FAILURE, "rejected", is_shared, is_remembered=False)
    return Finish(TaskRevokedError(f"skipped: {conflict}"), states.REVOKED, "revoked", is_shared)


def superseded(newer: LockSuperseded, task_id: object, *, is_shared: bool = False) -> Finish:
    """A newer message has come."""
    return Finish(newer, states.REVOKED, "revoked", is_shared or newer.task_id == task_id)


def revoked_before(error: Exception | None, task_id: object) -> Finish:
    """The message was revoked, with `error` if that was kept: this is stored again."""
    if isinstance(error, LockSuperseded):
        return superseded(error, task_id)
    return Finish(TaskRevokedError("revoked or skipped before"), states.REVOKED, "revoked")


def in_silence(policy: str, *, is_eager: bool, is_wrong_server: bool) -> Run | Fail | Wait | None:
    """The lock server has not answered. None: the message, which cannot be put back, waits where it is."""
    if policy == "run" and not is_wrong_server:
        return Run()
    if policy == "wait":
        return None
    return Fail() if policy == "raise" or is_eager else Wait("unavailable")


def must_not_be_refused(message: Message, *, acks_late: bool, has_replaced: bool) -> bool:
    """Whether another task that has the lock does not end this message: it waits.

    Half of its work may be done, if the body may have begun before: in an earlier attempt; or in an earlier delivery of
    a message that is acknowledged late, whose worker has died, or has lost the broker. Or it has replaced another
    message as it was sent, which may just have got the lock, and does not run any more.
    """
    return message.retries > 0 or (acks_late and message.may_have_begun) or has_replaced


def may_be_refused(message: Message, options: Options, *, waits: bool) -> bool:
    """Whether the policy counts when another task has the lock; `waits` is what `must_not_be_refused` returned."""
    if options.on_conflict in NEWEST_POLICIES:
        return True
    # To join is no refusal; and the copies of a message, one of which may come again, join one task, or none does.
    return not (message.retries > 0 if options.on_conflict == JOIN else waits)


def policy_for(
    message: Message, options: Options, chosen: ConflictPolicy, *, waits: bool, is_eager: bool
) -> ConflictPolicy:
    """What the policy that was chosen comes to for this message."""
    if chosen in WAITING_POLICIES and is_eager:
        return "raise"
    bound = bound_of(options, chosen, waits=waits)
    return "raise" if bound is not None and message.put_back_count("conflict") >= bound else chosen


def bound_of(options: Options, policy: ConflictPolicy, *, waits: bool) -> int | None:
    """How often the message is put back; None: without a limit, as a copy that has joined, which only looks."""
    return options.conflict_retries if policy == "retry" and not waits else None


def beside_copy(own: tuple[int, int], running: tuple[int, int], *, acks_late: bool, lease: float) -> Drop | Wait:
    """A copy of the message, or of another attempt, runs elsewhere; its lease lasts for so many seconds at most."""
    # A message that is acknowledged early is not run again when its worker dies: that is Celery's rule.
    if running > own or (running == own and not acks_late):
        return Drop("already running", goes_on=True)
    return Wait("copy", lease + AFTER_LEASE)


def is_over(recorded: Outcome, *, is_awaited: bool) -> bool:
    """Whether a message with this record has nothing more to report."""
    return recorded.settled or recorded.state in (states.RETRY, states.IGNORED) or not is_awaited


def after_end(
    recorded: Outcome, age: float, *, is_awaited: bool, is_stored: bool, is_part: bool
) -> Drop | Wait | Repeat:
    """The message ended `age` seconds ago.

    Args:
        is_stored: whether the result backend has its end.
        is_part: whether its chord counts it once, when that has been stored; its worker may have died in between.
    """
    if is_over(recorded, is_awaited=is_awaited) or (is_stored and not is_part):
        if recorded.state == states.RETRY or recorded.content == REPLACED:
            why = "retried" if recorded.state == states.RETRY else "replaced"
            return Drop(why, goes_on=not recorded.settled)
        return Drop("already done", goes_on=False)
    return Wait("copy", SETTLING - age) if age < SETTLING else Repeat()
