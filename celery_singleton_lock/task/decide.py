"""What becomes of a message whose body does not run now, decided from what is known of it: without effects.

`on_conflict` and `redelivery` do what is decided here. Protocol: `docs/protocol.md`, section 8.
"""

from __future__ import annotations

from typing import NamedTuple

from celery import states

from celery_singleton_lock.options.rules import JOIN, NEWEST_POLICIES, WAITING_POLICIES, ConflictPolicy
from celery_singleton_lock.options.task import Options
from celery_singleton_lock.task.ends import REPLACED, Outcome
from celery_singleton_lock.task.message import Message

#: Seconds after the end of the body in which its own process may still be sending callbacks and storing the result.
SETTLING = 10.0

#: Seconds after the end of a lease at which the put-back copy of a running message is due.
AFTER_LEASE = 1.0


class Drop(NamedTuple):
    """This delivery ends, and nothing is left to do for it.

    Attributes:
        goes_on: whether the message, or its next attempt, or its replacement, has the lock that it brought.
    """

    why: str
    goes_on: bool


class Wait(NamedTuple):
    """A copy is put back, and comes after `delay` seconds."""

    delay: float


class Repeat(NamedTuple):
    """The end that is known is reported again."""


def may_be_refused(message: Message, options: Options, *, acks_late: bool) -> bool:
    """Whether the policy counts when another task has the lock. Half of the work of a message that has begun may be
    done: it waits.
    """
    if options.on_conflict in NEWEST_POLICIES:
        return True
    # To join is no refusal; and the copies of a message, one of which may come again, join one task, or none does.
    begun = message.retries > 0 if options.on_conflict == JOIN else _has_begun(message, acks_late=acks_late)
    return not begun


def policy_for(
    message: Message, options: Options, chosen: ConflictPolicy, *, acks_late: bool, is_eager: bool
) -> ConflictPolicy:
    """What the policy that was chosen comes to for this message."""
    if chosen in WAITING_POLICIES and is_eager:
        return "raise"
    bound = bound_of(message, options, chosen, acks_late=acks_late)
    return "raise" if bound is not None and message.put_back_count("conflict") >= bound else chosen


def bound_of(message: Message, options: Options, policy: ConflictPolicy, *, acks_late: bool) -> int | None:
    """How often the message is put back; None: without a limit, as a copy that has joined, which only looks."""
    is_bounded = policy == "retry" and not _has_begun(message, acks_late=acks_late)
    return options.conflict_retries if is_bounded else None


def beside_copy(own: tuple[int, int], running: tuple[int, int], *, acks_late: bool, lease: float) -> Drop | Wait:
    """A copy of the message, or of another attempt, runs elsewhere; its lease lasts for so many seconds at most."""
    # A message that is acknowledged early is not run again when its worker dies: that is Celery's rule.
    if running > own or (running == own and not acks_late):
        return Drop("already running", goes_on=True)
    return Wait(lease + AFTER_LEASE)


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
    return Wait(SETTLING - age) if age < SETTLING else Repeat()


def _has_begun(message: Message, *, acks_late: bool) -> bool:
    """Whether the body may have begun before: in an earlier attempt; or in an earlier delivery of a message that is
    acknowledged late, whose worker has died, or has lost the broker.
    """
    return message.retries > 0 or (acks_late and message.may_have_begun)
