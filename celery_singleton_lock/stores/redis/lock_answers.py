"""The answers of the scripts in `scripts/lock`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, TypeVar

from redis.exceptions import RedisError, TimeoutError

from celery_singleton_lock import cleaned
from celery_singleton_lock.holder import FENCE, OWNER_LENGTH, Holder, task_arriving_as
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, LockRequest, Record, Superseded

#: The most slots of one key that are looked at.
MAX_SLOTS = 10_000

#: How often a question is repeated at once because more slots are in use than were named.
WIDER = 5

T = TypeVar("T")


class Answer(IntEnum):
    """The first part of the answer to an acquire or a refusal; `scripts/lock/answers.lua` has the same."""

    HELD = 0
    GRANTED = 1
    RECORD = 2
    NO_VOTE = 3
    GIVEN_UP = 4
    MORE_SLOTS = 5
    NEWEST = 6
    SUPERSEDED = 7


#: The parts of each answer, including this one.
_PARTS: Mapping[int, list[type]] = {
    Answer.HELD: [int, bytes, int, int],
    Answer.GRANTED: [int, int, int],
    Answer.RECORD: [int, bytes, int],
    Answer.NO_VOTE: [int, int],
    Answer.GIVEN_UP: [int],
    Answer.MORE_SLOTS: [int, int],
    Answer.NEWEST: [int, bytes, int, int, int],
    Answer.SUPERSEDED: [int, bytes, int, int, bytes],
}


#: The answers that an acquire can get: all but this one.
_OF_QUESTION = {kind: parts for kind, parts in _PARTS.items() if kind != Answer.NO_VOTE}

#: The answers that a refusal does not get.
_OF_AN_ACQUIRE = (Answer.GRANTED, Answer.NEWEST, Answer.SUPERSEDED)


def is_granted(answer: Any) -> bool:
    """Whether this begins as a grant does."""
    return type(answer) is list and answer[:1] == [Answer.GRANTED]


def answers_vote(answer: Any) -> bool:
    """Whether this can be the answer to a vote."""
    return _has_parts(answer, _PARTS)


def answers_question(answer: Any) -> bool:
    """Whether this can be the answer to an acquire or a hand-over."""
    return _has_parts(answer, _OF_QUESTION)


def answers_refusal(answer: Any) -> bool:
    """Whether this can be the answer to a `refuse`."""
    refused = [Answer.GRANTED]
    return answer == refused or (answers_question(answer) and answer[0] not in _OF_AN_ACQUIRE)


def answers_renewal(answer: Any) -> bool:
    """Whether this can be the answer to a renewal: for each hold 1 or 0, or the task for which it is to end."""
    return isinstance(answer, list) and all(isinstance(one, (int, bytes)) for one in answer)


class FreeAnswer(IntEnum):
    """The answers to freeing."""

    NOT_OURS = 0
    FREED = 1
    SOMEBODY_WAITS = 2


class GivenUp(RedisError):
    """The owner takes nothing any more: it was given up, or a refusal was, before the server carried this out."""


class MoreSlots(Exception):
    """There are holds in slots that were not named.

    Attributes:
        slots: how many to name.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.slots = min(slots, MAX_SLOTS)


def with_all_slots(slots: int, ask: Callable[[int], T]) -> T:
    """Ask with this many slots named, and again with all that are in use.

    Raises:
        TimeoutError: there were more each time, or there are more than can be.
    """
    for _ in range(WIDER):
        try:
            return ask(slots)
        except MoreSlots as more:
            slots = max(more.slots, slots)
    raise TimeoutError("the number of slots in use changes too often")


def parse_acquired(answer: Sequence[Any], request: LockRequest, sent_at: float) -> Lease | Held | Record:
    """What an acquire has got.

    Raises:
        GivenUp, MoreSlots: it has got nothing.
    """
    kind, *rest = answer
    if kind == Answer.GRANTED:
        fence, slot = rest
        return request.lease(fence=fence, sent_at=sent_at, slot=slot)
    if kind == Answer.GIVEN_UP:
        raise GivenUp("this owner was given up before the server carried out its request")
    return _in_the_way(answer, request.holder.message)


def parse_handed_over(answer: Sequence[Any], request: LockRequest) -> Lease | Held | Record | None:
    """As `parse_acquired`, for a `hand_over`; None if the answer says nothing: ask.

    A lease must be confirmed: nobody knows when it was asked for.
    """
    return None if answer[0] in (Answer.GIVEN_UP, Answer.MORE_SLOTS) else parse_acquired(answer, request, 0.0)


def parse_refusal(answer: Sequence[Any], message: str) -> Held | Record | None:
    """What a `refuse` has found; None if the message is refused.

    Raises:
        GivenUp, MoreSlots: it was not even tried.
    """
    if answer[0] == Answer.GIVEN_UP:
        raise GivenUp("this refusal was given up before the server carried it out")
    return None if answer[0] == Answer.GRANTED else _in_the_way(answer, message)


def parse_record(answer: Sequence[Any], message: str) -> Record | None:
    """What a `recorded` has found."""
    kind, *rest = answer
    return record(message, *rest) if kind == Answer.RECORD else None


def _has_parts(answer: Any, allowed: Mapping[int, list[type]]) -> bool:
    """Whether it begins with one of these kinds, and has the parts of that kind."""
    types = [*map(type, answer)] if type(answer) is list else []
    return bool(types) and types[0] is int and allowed.get(answer[0]) == types


def _in_the_way(answer: Sequence[Any], message: str) -> Held | Record:
    kind, *rest = answer
    if kind == Answer.MORE_SLOTS:
        raise MoreSlots(*rest)
    if kind in (Answer.HELD, Answer.NEWEST, Answer.SUPERSEDED):
        value, pttl, slot, *about = rest
        found = replace(parse_held(value, pttl), slot=slot)
        if kind == Answer.SUPERSEDED:
            return Superseded(found.holder, found.owner, found.remaining, slot, by=task_arriving_as(*about))
        return replace(found, arrived=about[0]) if about else found
    return record(message, *rest)


def fence_of(value: bytes) -> int | None:
    """The fence of a hold, which is inside the holder."""
    fields = cleaned.array(value[OWNER_LENGTH:])
    return cleaned.count(fields[FENCE]) or None if fields is not None and len(fields) > FENCE else None


def record(message: str, content: bytes, pttl: int) -> Record:
    """A message's record, with its remaining milliseconds."""
    return Record(message, content, max(pttl, 0) / 1000)


def parse_held(value: bytes, pttl: int) -> Held:
    """What a lock's value and its remaining milliseconds say."""
    owner, holder = value[:OWNER_LENGTH].decode(errors="replace"), Holder.loads(value[OWNER_LENGTH:])
    return Held(holder, owner, float("inf") if pttl == -1 else max(pttl, 0) / 1000)
