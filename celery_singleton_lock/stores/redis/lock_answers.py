"""The answers of the scripts in `scripts/lock`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

from redis.exceptions import RedisError, ResponseError

from celery_singleton_lock import cleaned
from celery_singleton_lock.holder import FENCE, OWNER_LENGTH, Holder, task_of_member
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, LockRequest, Record, Superseded


class Answer(IntEnum):
    """The first part of the answer to an acquire or a refusal; `scripts/lock/answers.lua` has the same."""

    HELD = 0
    GRANTED = 1
    RECORD = 2
    NO_VOTE = 3
    GIVEN_UP = 4
    NEWEST = 5
    SUPERSEDED = 6


#: The parts of each answer, including this one.
_PARTS: Mapping[int, list[type]] = {
    Answer.HELD: [int, bytes, int],
    Answer.GRANTED: [int, int],
    Answer.RECORD: [int, bytes, int],
    Answer.NO_VOTE: [int, int],
    Answer.GIVEN_UP: [int],
    Answer.NEWEST: [int, bytes, int, int, bytes],
    Answer.SUPERSEDED: [int, bytes, int, bytes, bytes],
}


def _one_of(*kinds: Answer) -> Callable[[Any], bool]:
    """Tells whether something can be an answer of one of these kinds."""
    allowed = {int(kind): _PARTS[kind] for kind in kinds}

    def can_be(answer: Any) -> bool:
        types = [*map(type, answer)] if type(answer) is list else []
        return bool(types) and types[0] is int and allowed.get(answer[0]) == types

    return can_be


#: Whether something can be the answer to an acquire.
answers_acquire = _one_of(*Answer)

_is_in_the_way = _one_of(Answer.HELD, Answer.RECORD, Answer.GIVEN_UP)


def answers_refusal(answer: Any) -> bool:
    """Whether this can be the answer to a `refuse`."""
    return answer == [Answer.GRANTED] or _is_in_the_way(answer)


def answers_renewal(answer: Any) -> bool:
    """Whether this can be the answer to a renewal: for each hold 1 or 0, or the task for which it is to end."""
    return isinstance(answer, list) and all(isinstance(one, (int, bytes)) for one in answer)


def answers_release(answer: Any) -> bool:
    """Whether this can be the answer to freeing: whether it was held, or the waiter to wake if it was."""
    return isinstance(answer, int) or _is_waiter(answer)


def answers_next(answer: Any) -> bool:
    """Whether this can be the waiter to wake; None if nobody waits."""
    return answer is None or _is_waiter(answer)


def _is_waiter(answer: Any) -> bool:
    """Whether this can be the name of a waiter, with its mailbox, and not the answer to another command."""
    return isinstance(answer, bytes) and b"|" in answer


def to_wake(answer: Any) -> bytes | None:
    """The waiter that an answer says to wake."""
    if isinstance(answer, list) and answer[0] in (Answer.NEWEST, Answer.SUPERSEDED):
        answer = answer[-1]
    return answer if isinstance(answer, bytes) and answer else None


#: The record of a promise begins with this. A refusal's record on a minority of a Redlock's nodes would look like the
#: message's end without being it: so the refusal is promised first.
PROMISE = b"?"

#: The answer to freeing what was not held.
NOT_OURS = 0


class GivenUp(RedisError):
    """The owner takes nothing any more: it was given up, or a refusal was, before the server carried this out."""


def parse_acquired(answer: Sequence[Any], request: LockRequest, sent_at: float) -> Lease | Held | Record:
    """What an acquire has got.

    Raises:
        GivenUp: it has got nothing.
    """
    kind, *rest = answer
    if kind == Answer.GRANTED:
        return request.lease(fence=rest[0], sent_at=sent_at)
    if kind in (Answer.GIVEN_UP, Answer.NO_VOTE):
        raise GivenUp("this owner was given up before the server carried out its request, or the server has no vote")
    return _in_the_way(answer, request.holder.message)


def parse_refusal(answer: Sequence[Any], message: str) -> Held | Record | None:
    """What a `refuse` has found; None if the message is refused.

    Raises:
        GivenUp: it was not even tried.
    """
    if answer[0] == Answer.GIVEN_UP:
        raise GivenUp("this refusal was given up before the server carried it out")
    return None if answer[0] == Answer.GRANTED else _in_the_way(answer, message)


def parse_record(answer: Sequence[Any], message: str) -> Record | None:
    """What a `recorded` has found. A promise is nothing yet."""
    kind, *rest = answer
    return record(message, *rest) if kind == Answer.RECORD and not rest[0].startswith(PROMISE) else None


def _in_the_way(answer: Sequence[Any], message: str) -> Held | Record:
    kind, *rest = answer
    if kind in (Answer.HELD, Answer.NEWEST, Answer.SUPERSEDED):
        value, pttl, *about = rest
        found = parse_held(value, pttl)
        if found.holder is not None and found.holder.order:
            found = replace(found, fence=_fence_in(value))  # Whoever takes its place gets a higher number.
        if kind == Answer.SUPERSEDED:
            return Superseded(found.holder, found.owner, found.remaining, by=task_of_member(about[0]))
        return replace(found, arrived=about[0]) if about else found
    return record(message, *rest)


def record(message: str, content: bytes, pttl: int) -> Record:
    """A message's record, with its remaining milliseconds."""
    return Record(message, content, max(pttl, 0) / 1000)


def parse_held(value: bytes, pttl: int) -> Held:
    """What a hold's value and its remaining milliseconds say."""
    owner, holder = value[:OWNER_LENGTH].decode(errors="replace"), Holder.loads(value[OWNER_LENGTH:])
    return Held(holder, owner, float("inf") if pttl == -1 else max(pttl, 0) / 1000, fence=_fence_in(value))


def parse_holds(found: object, pttl: int) -> list[Held]:
    """The holds at the key of a lock, the first to take it first.

    Args:
        found: the value; or the elements and scores of a set (see `holds.lua`).
        pttl: the remaining milliseconds of the key, which ends with the last of them.

    Raises:
        ResponseError: the elements of the set are something else.
    """
    if not isinstance(found, list):
        return [parse_held(found, pttl)] if isinstance(found, bytes) else []
    pairs = zip(found[::2], found[1::2], strict=False)
    ends = {value: cleaned.whole(end) or 0 for value, end in pairs if isinstance(value, bytes)}
    now = max(ends.values(), default=0) - pttl
    each = [parse_held(value, -1 if pttl == -1 else end - now) for value, end in ends.items()]
    held = [replace(it, shared=True) for it in each]
    if any(it.holder is None for it in held):
        raise ResponseError("WRONGTYPE a set of other elements")
    return sorted((it for it in held if it.remaining), key=lambda it: it.fence or 0)


def _fence_in(value: bytes) -> int | None:
    """The fence of a hold, which is inside the holder."""
    fields = cleaned.array(value[OWNER_LENGTH:])
    return cleaned.count(fields[FENCE]) or None if fields is not None and len(fields) > FENCE else None
