"""The answers of the nodes of a Redlock to one attempt to take a lock."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.stores.redis.lock_answers import Answer, parse_held, record
from celery_singleton_lock.stores.redis.redlock.commands import PROMISE
from celery_singleton_lock.stores.redis.redlock.conversation import Answers, NotAsked
from celery_singleton_lock.stores.redis.server import words_of


@dataclass(slots=True)
class Votes:
    """The answers to a `vote`, by the node's index.

    Attributes:
        quorum: how many are a majority.
        message: the message that the lock was asked for.
        granted: the fences of the nodes that granted it.
        held: the holder on each node where it is held.
        record: the message's record, if one was found.
        withheld: why a node that answered has no vote.
        errors: why a node did not answer.
        unasked: nodes that were not even asked.
        is_given_up: whether somebody has given the owner up.
    """

    quorum: int
    message: str
    granted: list[int] = field(default_factory=list)
    held: dict[int, Held] = field(default_factory=dict)
    record: Record | None = None
    withheld: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    unasked: set[int] = field(default_factory=set)
    is_given_up: bool = False

    @classmethod
    def of(cls, answers: Answers, quorum: int, message: str) -> Votes:
        votes = cls(quorum, message)
        for index, answer in answers.items():
            votes._add(index, answer)
        return votes

    @property
    def has_majority(self) -> bool:
        return len(self.granted) >= self.quorum

    @property
    def is_held(self) -> bool:
        """Whether one owner is known to have a majority."""
        return any(count >= self.quorum for count in self._owners().values())

    @property
    def holder(self) -> Held | None:
        """The holder as far as is known: the owner on most nodes; None if it seems to be free."""
        if not self.held:
            return None
        owner = self._owners().most_common(1)[0][0]
        of_owner = [held for held in self.held.values() if held.owner == owner]
        holder = next((held.holder for held in of_owner if held.holder is not None), None)
        return Held(holder, owner, max(held.remaining for held in of_owner))

    @property
    def voted(self) -> int:
        """How many nodes have voted."""
        return len(self.granted) + len(self.held)

    def _owners(self) -> Counter[str]:
        return Counter(held.owner for held in self.held.values())

    def _add(self, index: int, answer: Any) -> None:
        if isinstance(answer, Exception):
            self.errors[index] = words_of(answer)
            if isinstance(answer, NotAsked):
                self.unasked.add(index)
            return
        kind, *rest = answer
        if kind == Answer.GRANTED:
            self.granted.append(rest[0])
        elif kind == Answer.HELD:
            self.held[index] = parse_held(rest[0], rest[1])
        elif kind == Answer.RECORD and rest[0].startswith(PROMISE):
            self.withheld[index] = "the message is being refused"
        elif kind == Answer.RECORD:
            self.record = record(self.message, *rest)
        elif kind == Answer.GIVEN_UP:
            self.withheld[index], self.is_given_up = "the owner was given up", True
        else:
            self.withheld[index] = f"it came back without its data, and has no vote for {rest[0] / 1000:.1f} s"
