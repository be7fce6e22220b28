"""How a message is sent again ("put back"): the same message, to the queue that it was taken from, due later.

An execution that finds its lock held, or no lock server, ends; its message goes on as a copy. A copy keeps the id, the
retries, and with them the result, the chain, the chord and the callbacks; nothing is recorded for the delivery that
sent it. Its header says, under `put_back`, how often it was put back, and which owners earlier deliveries gave up.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, NoReturn

from celery.exceptions import Ignore
from celery.utils.log import get_logger
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_singleton_lock import chance, cleaned, clock
from celery_singleton_lock.holder import is_owner
from celery_singleton_lock.keys.key import is_key
from celery_singleton_lock.options.delivery import longest_delay
from celery_singleton_lock.options.rules import MAX_LIMIT, MAX_TTL, is_whole
from celery_singleton_lock.runtime import Runtime
from celery_singleton_lock.stores.base import MAX_GIVEN_UP
from celery_singleton_lock.stores.store import Place
from celery_singleton_lock.task import delivery, header
from celery_singleton_lock.task.celery_types import RequestLike, TaskLike
from celery_singleton_lock.task.execution import named
from celery_singleton_lock.task.joined import Joined
from celery_singleton_lock.task.leader import Leader
from celery_singleton_lock.task.putback import Publisher
from celery_singleton_lock.task.running import progress_of

logger = get_logger(__name__)

#: Why a message is sent again: another task holds its lock; the lock server does not answer; it runs elsewhere, and the
#: copy waits in case that worker dies; it ends as another message, which has not ended yet.
Reason = Literal["conflict", "unavailable", "copy", "follows"]

#: The reasons in the log.
WHY: Mapping[Reason, str] = {
    "conflict": "another task has its lock",
    "unavailable": "the lock server does not answer",
    "copy": "it runs elsewhere, or has ended there",
    "follows": "the task that it follows has not ended",
}

#: Reasons to send a message again that has not begun, and may still expire. The header counts these.
NOT_BEGUN: tuple[Reason, ...] = ("conflict", "unavailable", "follows")

#: Seconds before the first put-back copy is due; doubled for each further one.
FIRST_DELAY = 1.0

#: The most seconds that a put-back copy waits.
MAX_DELAY: Mapping[Reason, float] = {
    "conflict": 60.0,
    "unavailable": 8.0,
    "copy": 60.0,
    "follows": 60.0,
}

#: The highest number in an order: a float holds it exactly.
MAX_NUMBER = 2**53


class GoesOn(Ignore):
    """Ends an execution, but not its message: another copy of the message is carried out, or will be."""

    @classmethod
    def read(cls, text: str) -> str | None:
        """The reason in the repr of such an exception; None for other texts."""
        found = re.fullmatch(rf"{cls.__name__}\('([^'\\]*)'\)", text)
        return found and found[1]


class Waits(NamedTuple):
    """The lock that a copy waits for, and how many may hold it at once."""

    key: str
    limit: int


class Carried(NamedTuple):
    """What a copy has to know. If a part is None, the copy knows the same as the copy before it; but `waits` is new.

    Attributes:
        waits: the lock that it waits for; the worker that gets the copy may begin it sooner.
        joins: the task that it is to end as.
        follows: the message that it is to end as.
        arrived: its number in the order of its key, see `stores.base.Arrival`.
    """

    waits: Waits | None = None
    joins: Joined | None = None
    follows: Leader | None = None
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
        GoesOn: the message was sent.
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

    The copy may be on its way. It treats the hold of the owner that the progress gives up as free, so this delivery
    must not ask under that owner again.
    """
    request = task.request
    # What was recorded as its end before may not have been stored: the copy sees to that.
    progress_of(request).settle = None
    if delay is None:
        delay = back_off(put_back_count(request, reason), at_most=MAX_DELAY[reason])
    delay = max(min(delay, longest_delay(task.app.conf), MAX_TTL), 0.0)
    known = _known_of_next(request, reason, carried)
    begins = "waits for the lock" if _is_woken(task, known) else f"due in {delay:.1f} s"
    try:
        _send(task, reason, delay, known)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is not the result of the message
        logger.warning("%s cannot be put back: %r", named(task), error)
        return
    raise GoesOn(f"put back, {begins}: {WHY[reason]}")


def put_back_count(request: RequestLike, reason: Reason) -> int:
    """How often this attempt of the message was put back for `reason`.

    What others wrote there, or what an earlier attempt left there, counts as never.
    """
    return _count(_known_of(request).get(reason)) or 0


def was_put_back(request: RequestLike) -> bool:
    """Whether it is a copy that was put back."""
    return bool(_known_of(request))


def may_have_begun(request: RequestLike) -> bool:
    """Whether an earlier delivery of this attempt may be running it, or have ended it: it was delivered again, or is
    the copy of a message that was.
    """
    return delivery.is_redelivered(request) or _known_of(request).get("redelivered") is True


def has_begun(task: TaskLike) -> bool:
    """Whether the body of the running message may have begun before: in an earlier attempt; or in an earlier delivery
    of a message that is acknowledged late, whose worker has died, or has lost the broker.
    """
    return is_later_attempt(task) or bool(task.acks_late and may_have_begun(task.request))


def is_later_attempt(task: TaskLike) -> bool:
    return cleaned.count(task.request.retries) > 0


def comes_too_late(request: RequestLike) -> bool:
    """Whether the message has expired, and reaches its task all the same, since it may have begun before."""
    expires = maybe_iso8601(request.expires) if may_have_begun(request) else None
    return expires is not None and maybe_make_aware(expires).timestamp() < clock.wall()


def is_in_line(request: RequestLike) -> bool:
    """Whether this is a copy that waits for a lock, and may have been woken for it."""
    return "waits" in _known_of(request)


def joined_by(request: RequestLike) -> Joined | None:
    """The task that this copy has joined; None if it has joined none."""
    known = _known_of(request)
    return Joined.read(known["joins"]) if "joins" in known else None


def followed_by(request: RequestLike) -> Leader | None:
    """The message that this copy follows now; None if it has followed none yet."""
    known = _known_of(request)
    return Leader.read(known["leader"]) if "leader" in known else None


def arrived(request: RequestLike) -> int | None:
    """The number that the message has in the order of its key, whichever attempt got it; None if that is not known."""
    number = _known_of_any_attempt(request).get("arrived")
    return number if is_whole(number, 1, MAX_NUMBER) else None


def seconds_in_line(request: RequestLike, now: float) -> float:
    """Seconds since this attempt first met a conflict; `now` in seconds since the epoch. 0 if it met none."""
    since = cleaned.seconds(_known_of(request).get("since"))
    return max(now - since, 0.0) if since else 0.0


def waits_for(request: RequestLike, prefix: str) -> tuple[str, Place] | None:
    """The lock that this copy waits for, and its place in the line of that lock; None if it waits for none."""
    known = _known_of(request)
    waits = known.get("waits")
    if not isinstance(waits, (list, tuple)) or len(waits) != len(Waits._fields):
        return None
    key, limit = waits
    if not (isinstance(key, str) and key == cleaned.key(key) and is_key(prefix, key)):
        return None
    return (key, Place(_since(known), limit)) if is_whole(limit, 1, MAX_LIMIT) else None


def given_up(request: RequestLike) -> tuple[str, ...]:
    """The owners under which earlier deliveries of this attempt have asked for the lock without an answer; the latest
    sixteen.
    """
    owners = _known_of(request).get("given_up")
    if not isinstance(owners, (list, tuple)):
        return ()
    return tuple(owner for owner in owners if is_owner(owner))[-MAX_GIVEN_UP:]


def returned(request: RequestLike) -> int:
    """How often the broker has taken this attempt back from workers that went, now and as the copies before.

    In a quorum queue, RabbitMQ counts that of each message, and of a copy anew. A message that was dead-lettered since
    begins anew, too: somebody sends it again on purpose.
    """
    original = delivery.original_of(request)
    if original is None:
        return 0
    before = 0
    carried = _known_of(request).get("returned")
    if isinstance(carried, list) and len(carried) == 2 and carried[1] == original.deaths:
        before = _count(carried[0]) or 0
    return before + original.returned


def back_off(count: int, *, at_most: float = MAX_DELAY["conflict"]) -> float:
    """Seconds to wait after `count` tries."""
    return chance.back_off(count, FIRST_DELAY, at_most)


def _send(task: TaskLike, reason: Reason, delay: float, known: dict[str, Any]) -> None:
    request = task.request
    expires = reason in NOT_BEGUN
    made = header.Made({**header.of(request), "id": request.id, "put_back": known})
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
    return "waits" in known and is_kept and not looks and Runtime.of(task.app).store.wake_ups() is not None


def _known_of_next(request: RequestLike, reason: Reason, carried: Carried) -> dict[str, Any]:
    """What the header of the next copy says."""
    counts: dict[str, Any] = {other: put_back_count(request, other) + (other == reason) for other in NOT_BEGUN}
    counts = {other: count for other, count in counts.items() if count}
    owner = progress_of(request).gives_up
    owners = given_up(request) if owner is None else (*given_up(request), owner)
    given_up_by_now = list(owners[-MAX_GIVEN_UP:])
    known: dict[str, Any] = {"retries": request.retries or 0, **counts, "given_up": given_up_by_now}
    if carried.waits is not None:
        known["waits"] = list(carried.waits)
    if (joins := carried.joins or joined_by(request)) is not None:
        known["joins"] = list(joins)
    if (follows := carried.follows or followed_by(request)) is not None:
        known["leader"] = follows.header()
    if carried.waits is not None or "since" in _known_of(request):
        known["since"] = _since(_known_of(request))
    if (number := carried.arrived or arrived(request)) is not None:
        known["arrived"] = number
    if may_have_begun(request):
        known["redelivered"] = True
    if (count := returned(request)) and (original := delivery.original_of(request)) is not None:
        known["returned"] = [count, original.deaths]
    return known


def _known_of(request: RequestLike) -> dict[str, Any]:
    """What its header says of this attempt; what others wrote counts as nothing."""
    if "put_back" not in header.of(request):  # As in most messages.
        return {}
    known = _known_of_any_attempt(request)
    return known if _count(known.get("retries")) == (request.retries or 0) else {}


def _known_of_any_attempt(request: RequestLike) -> dict[str, Any]:
    """What its header says of whichever attempt was put back last."""
    known = header.of(request).get("put_back")
    return known if isinstance(known, dict) else {}


def _since(known: Mapping[str, Any]) -> float:
    """When the message first met a conflict: now, if it has met none before."""
    return min(cleaned.seconds(known.get("since")) or math.inf, clock.wall())


def _count(value: object) -> int | None:
    """A number of times; None for nonsense."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
