"""How a message is sent again ("put back"): the same message, to the queue that it was taken from, due later.

An execution that finds its lock held, or no lock server, ends; its message goes on as a copy. A copy keeps the id, the
retries, and with them the result, the chain, the chord and the callbacks; nothing is recorded for the delivery that
sent it. Its header says, under `put_back`, how often it was put back, and which owners earlier deliveries gave up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from celery.utils.log import get_logger

from celery_singleton_lock import clock
from celery_singleton_lock.options.app import longest_delay
from celery_singleton_lock.options.rules import MAX_TTL
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import MAX_GIVEN_UP
from celery_singleton_lock.task import delivery, header
from celery_singleton_lock.task.ends import Concluded
from celery_singleton_lock.task.message import NOT_BEGUN, Reason, RequestLike, Target, TaskLike, Waits
from celery_singleton_lock.task.putback import Publisher
from celery_singleton_lock.task.turn import message_of, named, turn_of, unsettled

logger = get_logger(__name__)

#: The reasons in the log.
WHY: Mapping[Reason, str] = {
    "conflict": "another task has its lock",
    "unavailable": "the lock server does not answer",
    "copy": "it runs elsewhere, or has ended there",
    "follows": "the task that it follows has not ended",
}

#: Seconds before the first put-back copy is due; doubled for each further one.
FIRST_DELAY = 1.0

#: The most seconds that a put-back copy waits.
MAX_DELAY: Mapping[Reason, float] = {
    "conflict": 60.0,
    "unavailable": 8.0,
    "copy": 60.0,
    "follows": 60.0,
}


class Carried(NamedTuple):
    """What a copy has to know. If a part is None, the copy knows the same as the copy before it; but `waits` is new.

    Attributes:
        waits: the lock that it waits for; the worker that gets the copy may begin it sooner.
        joins: the task that it is to end as.
        follows: the message that it is to end as.
        arrived: its number in the order of its key, see `stores.base.Arrival`.
    """

    waits: Waits | None = None
    joins: Target | None = None
    follows: Target | None = None
    arrived: int | None = None


#: Nothing new.
AS_BEFORE = Carried()


def put_back(task: TaskLike, *, reason: Reason, delay: float | None = None, carried: Carried = AS_BEFORE) -> NoReturn:
    """Send the running message again, with the same id and retries, due in `delay` seconds; then end this execution.

    While the broker does not take it, the message is kept here and sent again.

    Args:
        task: its `request` is the message.
        reason: why. A message that was begun, here or elsewhere, does not expire any more.
        delay: seconds; by default longer each time that it was put back for this reason, with jitter.
        carried: what the copy has to know.

    Raises:
        Concluded: the message was sent.
    """
    failures = 0
    while True:
        try_to_put_back(task, reason=reason, delay=delay, carried=carried)
        clock.sleep(back_off(failures))
        failures += 1


def try_to_put_back(
    task: TaskLike, *, reason: Reason, delay: float | None = None, carried: Carried = AS_BEFORE
) -> None:
    """As `put_back`, but return if the broker has not taken it: then it is not known whether it will.

    The copy may be on its way. It treats the hold of the owner that the turn gives up as free, so this delivery
    must not ask under that owner again.
    """
    request = task.request
    # What was recorded as its end before may not have been stored: the copy sees to that.
    unsettled.pop(request, None)
    if delay is None:
        delay = back_off(message_of(request).put_back_count(reason), at_most=MAX_DELAY[reason])
    delay = max(min(delay, longest_delay(task.app.conf), MAX_TTL), 0.0)
    known = _known_of_next(request, reason, carried)
    begins = "waits for the lock" if _is_woken(task, known) else f"due in {delay:.1f} s"
    try:
        _send(task, reason, delay, known)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is not the result of the message
        logger.warning("%s cannot be put back: %r", named(task), error)
        return
    raise Concluded(f"put back, {begins}: {WHY[reason]}", "continues")


def returned(request: RequestLike) -> int:
    """How often the broker has taken this attempt back from workers that went, now and as the copies before.

    In a quorum queue, RabbitMQ counts that of each message, and of a copy anew. A message that was dead-lettered since
    begins anew, too: somebody sends it again on purpose.
    """
    original = delivery.original_of(request)
    if original is None:
        return 0
    before, deaths = message_of(request).note.returned or (0, 0)
    return original.returned + (before if deaths == original.deaths else 0)


def back_off(count: int, *, at_most: float = MAX_DELAY["conflict"]) -> float:
    """Seconds to wait after `count` tries."""
    return clock.back_off(count, FIRST_DELAY, at_most)


def _send(task: TaskLike, reason: Reason, delay: float, known: dict[str, Any]) -> None:
    request = task.request
    expires = reason in NOT_BEGUN
    made = header.Made({**message_of(request).carried, "id": request.id, "put_back": known})
    if (original := delivery.original_of(request)) is not None:
        Publisher.of(task.app).send(original, made, expires=expires, delay=delay)
        return
    # Made anew, as for a retry: nobody has kept it (a request class of the user's own, see `audit`, or protocol 1).
    copy = task.signature_from_request(request, countdown=math.ceil(delay), retries=request.retries or 0)
    if not expires:
        copy.set(expires=None)
    copy.set(headers=header.added(copy.options.get("headers"), made)).apply_async()


def _is_woken(task: TaskLike, known: Mapping[str, Any]) -> bool:
    """Whether the copy begins when its lock is free, wherever a worker can be woken, and not when it is due."""
    is_kept = delivery.original_of(task.request) is not None
    looks = "joins" in known or "arrived" in known
    return "waits" in known and is_kept and not looks and not Runtime.of(task.app).settings.backend.in_memory


def _known_of_next(request: RequestLike, reason: Reason, carried: Carried) -> dict[str, Any]:
    """What the header of the next copy says."""
    message = message_of(request)
    note, owner = message.note, turn_of(request).gives_up
    counts: dict[str, Any] = {other: message.put_back_count(other) + (other == reason) for other in NOT_BEGUN}
    counts = {other: count for other, count in counts.items() if count}
    owners = note.given_up if owner is None else (*note.given_up, owner)
    known: dict[str, Any] = {"retries": message.retries, **counts, "given_up": list(owners[-MAX_GIVEN_UP:])}
    if carried.waits is not None:
        known["waits"] = list(carried.waits)
    if (joins := carried.joins or note.joins) is not None:
        known["joins"] = list(joins)
    if (follows := carried.follows or note.follows) is not None:
        known["leader"] = list(follows)
    if carried.waits is not None or note.since:
        known["since"] = note.since_now()
    if (number := carried.arrived or message.number) is not None:
        known["arrived"] = number
    if message.may_have_begun:
        known["redelivered"] = True
    if (count := returned(request)) and (original := delivery.original_of(request)) is not None:
        known["returned"] = [count, original.deaths]
    return known
