"""What is the same on one server, on a cluster, and on a Redlock: a majority answers, and one is a majority of one.

A single server is not a Redlock of one node, though. It may be asked again under the same owner, since it alone knows
what became of that; it counts fencing tokens by its own clock; and asking one takes a third of the time that asking
many at once takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.base import Held, LockRequest, Record
from celery_singleton_lock.stores.redis import inspect, keyspace, lock_answers, lock_commands
from celery_singleton_lock.stores.redis.ledger import RedisLedger
from celery_singleton_lock.stores.redis.mailbox import RedisMailbox
from celery_singleton_lock.stores.redis.script import Call
from celery_singleton_lock.stores.redis.server import Server, words_of
from celery_singleton_lock.stores.store import KeyState, Place
from celery_singleton_lock.stores.waiters import Waiter

Item = TypeVar("Item")
T = TypeVar("T")

#: The most seconds to wait for the other nodes of a Redlock when a majority has refused the lock or renewed it; and the
#: most of a ttl if it was renewed: a node that is always last, being farther away, would not get back what it lacks.
FARTHER, FARTHER_SHARE = 0.1, 1 / 100

#: Seconds that waking a waiter may take at each step: its mailbox may be on another node of the cluster, which hangs,
#: and a release is not to wait for that.
WAKING = 0.25


class Answers(dict[int, Any]):
    """What servers answered to a call, by their index; an exception where one failed.

    Attributes:
        sent_at: when it was sent, by `clock.now()`.
    """

    def __init__(self, answers: Mapping[int, Any] | None = None, *, sent_at: float = 0.0) -> None:
        super().__init__(answers or {})
        self.sent_at = sent_at

    @property
    def given(self) -> list[Any]:
        """Those that are not errors."""
        return [answer for answer in self.values() if not isinstance(answer, Exception)]

    @property
    def errors(self) -> dict[int, str]:
        """What was wrong, by the server's index."""
        return {index: words_of(answer) for index, answer in self.items() if isinstance(answer, Exception)}


#: Whether the answers to a call are enough, by its place among the calls: None as long as they do not decide the
#: matter; then the seconds for which further ones are collected, mostly 0.
Enough = Callable[[int, Answers], float | None]


class CommonStore(ABC):
    """A `Store`, but for the ways in which each kind takes and frees locks.

    Args:
        server: the name of the place, for messages.
        mailbox: wakes the waiters of this process.
        quorum: how many servers are a majority.
        spare: how many may say something else without changing what a majority says.
    """

    def __init__(self, server: str, mailbox: RedisMailbox, *, quorum: int = 1, spare: int = 0) -> None:
        self.server, self.mailbox = server, mailbox
        self._quorum, self._spare = quorum, spare

    @abstractmethod
    def abandon(self, hold: Hold) -> bool | None:
        """See `Store.abandon`."""

    @abstractmethod
    def _wanted(self, request: LockRequest) -> Lease | Held | Record:
        """As `Store.acquire`, for a waiter: its owner stays, or a new one is noted, and what it got is not undone."""

    @abstractmethod
    def _ask(self, calls: Sequence[Call], enough: Enough, *, step: float | None = None) -> list[Answers]:
        """The answers to each call, asked once.

        Args:
            calls: what to ask.
            enough: see `Enough`.
            step: seconds that each step (connect, read) may take.
        """

    @abstractmethod
    def _majority(self, call: Call, *, of: str = "") -> list[Any]:
        """The answers of a majority at least, asked again until there is one.

        Args:
            call: what to ask.
            of: the lock that it is about: what is still to be said of that comes first.

        Raises:
            LockUnavailable: there is none.
        """

    @abstractmethod
    def _read(self, reading: Callable[[Server], T], key: str = "") -> list[T]:
        """What each server shows that has a say about a key, or about any key; of a majority at least.

        Raises:
            LockUnavailable: fewer answer.
        """

    @abstractmethod
    def _unanswered(self, each: Sequence[Answers]) -> LockUnavailable:
        """The error that says why these are not enough."""

    @abstractmethod
    def _batches(self, items: Sequence[Item], key_of: Callable[[Item], str]) -> Iterator[Sequence[Item]]:
        """The items in groups that can be named in one call."""

    def _heal(  # noqa: B027 - a server alone lacks nothing that it has
        self, parts: Sequence[Sequence[Hold]], each: Sequence[Answers], renewed: Mapping[Hold, bool], *, seconds: float
    ) -> None:
        """Give servers the holds back that they lack."""

    def renew(self, holds: Sequence[Hold], *, timeout: float) -> list[bool]:
        parts = [*self._batches(holds, lambda hold: hold.key)]
        # A lease may get another one at any line: it is trusted for the one that it asks for.
        ttls = {hold: hold.ttl for hold in holds}
        linger = min(FARTHER, FARTHER_SHARE * min(ttls.values(), default=0.0))

        def enough(place: int, answers: Answers) -> float | None:
            return linger if len(self._renewed(parts[place], answers)) == len(parts[place]) else None

        each = self._ask([lock_commands.renew(part, ttls) for part in parts], enough, step=timeout)
        renewed: dict[Hold, bool] = {}
        for part, answers in zip(parts, each, strict=True):
            renewed |= self._renewed(part, answers)
            for answer in answers.given:
                for hold, task in zip(part, lock_commands.superseded(part, answer), strict=True):
                    hold.supersede(task)
            for hold in part:
                if renewed.get(hold) and isinstance(hold, Lease):
                    hold.extend(answers.sent_at, ttls[hold])
        self._heal(parts, each, renewed, seconds=timeout)
        if len(renewed) < len(holds):
            raise self._unanswered(each)
        return [renewed[hold] for hold in holds]

    def _renewed(self, part: Sequence[Hold], answers: Answers) -> dict[Hold, bool]:
        """Which holds are still held and which are not; those for which that is not clear are left out."""
        each = [lock_commands.renewed(part, answer) for answer in answers.given]
        if len(each) < self._quorum:
            return {}
        votes = {hold: sum(ours) for hold, *ours in zip(part, *each, strict=True)}
        return {
            hold: ours >= self._quorum
            for hold, ours in votes.items()
            if ours >= self._quorum or len(each) - ours > self._spare
        }

    def waiter(self, request: LockRequest) -> Waiter:
        def leave(frees: bool) -> None:
            if frees:
                self.abandon(request.hold())
            self._next(lock_commands.next_waiter(request.key, request.member, wakes=False))

        return Waiter(self.mailbox, request, lambda: self._wanted(request), leave)

    def look(self, places: Sequence[Place]) -> list[int]:
        each = self._ask(
            [lock_commands.look(it, self.mailbox.member(it.key, it.name)) for it in places], self._is_answered
        )
        for answers in each:
            # What somebody else has put in place of a lock is never free; but other errors are those of a server.
            answers.update({index: 0 for index, it in answers.items() if inspect.is_strange(it)})
        if any(len(answers.given) < self._quorum for answers in each):
            raise self._unanswered(each)
        return [sorted(answers.given, reverse=True)[self._quorum - 1] for answers in each]

    def wake(self, key: str, leaves: str = "") -> bool:
        return self._next(lock_commands.next_waiter(key, leaves and self.mailbox.member(key, leaves)))

    def leave(self, key: str, name: str) -> None:
        self._next(lock_commands.next_waiter(key, self.mailbox.member(key, name), wakes=False))

    def _next(self, call: Call) -> bool:
        (answers,) = self._ask([call], self._is_answered)
        return self._push(answers.given)

    def _push(self, given: Sequence[Any]) -> bool:
        """Wake the waiter that most answers name; whether they name one."""
        named = Counter(member for it in given if (member := lock_answers.to_wake(it)) is not None)
        for member, _ in named.most_common(1):
            # Nobody waits for the answers, if that is possible.
            self._ask([lock_commands.push(member.decode(errors="replace"))], lambda *_: 0.0, step=WAKING)
        return bool(named)

    def _is_answered(self, place: int, answers: Answers) -> float | None:
        return 0.0 if len(answers.given) >= self._quorum else None

    def held(self, key: str) -> list[Held]:
        each = self._read(lambda it: [(key, held) for held in inspect.held(it, key)], keyspace.run_key(key))
        return [held for _, held in inspect.agreed(each, self._quorum)]

    def all_held(self, prefix: str) -> Iterator[tuple[str, Held]]:
        yield from inspect.agreed(self._read(lambda it: [*inspect.all_held(it, prefix)]), self._quorum)

    def inspect(self, key: str) -> KeyState:
        return inspect.merged(self._read(lambda it: inspect.inspect(it, key), keyspace.run_key(key)), self._quorum)

    def recorded(self, key: str, message: str) -> Record | None:
        """See `Store.recorded`. What one server remembers has happened, as for an acquire."""
        each = self._majority(lock_commands.recorded(key, message), of=key)
        return next(filter(None, (lock_answers.parse_record(it, message) for it in each)), None)

    def ledger(self, key: str) -> RedisLedger:
        def known() -> list[tuple[bytes, int]]:
            return [*chain(*self._read(lambda it: [*inspect.entries(it, key)], key + keyspace.LEDGER))]

        return RedisLedger(key, self._majority, known, quorum=self._quorum)
