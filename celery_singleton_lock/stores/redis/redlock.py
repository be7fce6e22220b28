"""Redlock: locks on a majority of independent Redis servers, so that no single failure or failover can give one twice.

The algorithm is that of https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/: all nodes are asked
at once; who gets a majority has the lock for its ttl, less what that took and what the nodes' clocks may differ in
rate; who does not takes back what it got, on every node, and tries again after a random delay. Beyond that:

- One connection per node carries everything in order, so that taking back never overtakes a late acquire; and each
  attempt has a name, under which a node refuses what comes after it was given up.
- A node that has lost its memory has no vote for one ttl, however its operators restart it.
- A fencing token is the highest counter of a majority, and is written back to a majority before it is given out: any
  later majority shares a node with that one, and so counts higher.
- A renewal needs a majority, and puts the lock back on nodes that have lost it, for the next time.
- A waiter's bell hangs on one node, the same for all who wait for a lock while that node is well; the first in the
  queue is woken first as long as that is so.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from celery.utils.log import get_logger
from redis.exceptions import ConnectionError, RedisError, TimeoutError

from celery_singleton_lock import chance, clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.base import Held, LockRequest, Record, Reservation
from celery_singleton_lock.stores.inspector import MOST_RECORDS, KeyState
from celery_singleton_lock.stores.redis import inspect, lock_answers, lock_commands, vote_commands
from celery_singleton_lock.stores.redis.journal import RedisJournal
from celery_singleton_lock.stores.redis.ledger import RedisLedger
from celery_singleton_lock.stores.redis.lock_answers import Answer, Freed
from celery_singleton_lock.stores.redis.owing import Owing
from celery_singleton_lock.stores.redis.quorum_io import (
    Answers,
    Fan,
    Node,
    NotAsked,
)
from celery_singleton_lock.stores.redis.script import BATCH, Call
from celery_singleton_lock.stores.redis.server import Reader, Server, told
from celery_singleton_lock.stores.redis.waiter import RedisBell
from celery_singleton_lock.stores.waiters import AskingWaiter

logger = get_logger(__name__)

#: Tries to get a majority, and the seconds between two of them: a random time from half of this to the whole.
TRIES, RETRY_DELAY = 3, 0.2

#: What share of the ttl the nodes get to answer, and the seconds at least and at most.
ANSWER_SHARE, MIN_ANSWER, MAX_ANSWER = 1 / 20, 0.05, 0.5

#: Seconds at most for connecting to all nodes; and for waiting in vain where they are read one after the other.
CONNECT_ALL, READ_ALL = 0.5, 3.0

#: Seconds after which no new try is begun to get a majority.
PATIENCE = 3.0

#: Seconds at least for which a node is owed an undoing, or a release: what it was sent before may come as late.
OWED = 600.0

T = TypeVar("T")

#: Seconds for which a node promises to refuse a message: much longer than the round trip that ends it.
PROMISED = 5.0

#: Seconds that one step of connecting to a node may take.
CONNECT = 0.25


@dataclass(slots=True)
class _Votes:
    """What the nodes answered to one attempt, by their index."""

    quorum: int
    message: str
    granted: dict[int, int] = field(default_factory=dict)
    held: dict[int, Held] = field(default_factory=dict)
    record: Record | None = None
    withheld: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    #: So many are in use on some node, where that is more than were named.
    slots: int = 0
    unasked: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, answers: Answers, quorum: int, message: str) -> _Votes:
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
        """Who holds the lock as far as is known: the owner on most nodes; None if it seems to be free."""
        if not self.held:
            return None
        owner = self._owners().most_common(1)[0][0]
        of_owner = [held for held in self.held.values() if held.owner == owner]
        holder = next((held.holder for held in of_owner if held.holder is not None), None)
        return Held(holder, owner, max(held.remaining for held in of_owner))

    def _owners(self) -> Counter[str]:
        return Counter(held.owner for held in self.held.values())

    @property
    def answered(self) -> int:
        """How many nodes have voted, or said that they do not."""
        return len(self.granted) + len(self.held) + len(self.withheld)

    def _add(self, index: int, answer: Any) -> None:
        if isinstance(answer, Exception):
            self.errors[index] = told(answer)
            if isinstance(answer, NotAsked):
                self.unasked.add(index)
        elif answer[0] == Answer.GRANTED:
            self.granted[index] = answer[1]
        elif answer[0] == Answer.HELD:
            held = lock_answers.held(answer[1], answer[2])
            self.held[index] = replace(held, owner=vote_commands.attempt_of(held.owner, 0))
        elif answer[0] == Answer.RECORD and answer[1].startswith(vote_commands.PROMISE):
            self.withheld[index] = "the message is being refused"
        elif answer[0] == Answer.RECORD:
            self.record = Record(self.message, answer[1], max(answer[2], 0) / 1000)
        elif answer[0] == Answer.GIVEN_UP:
            self.withheld[index] = "the owner was given up"
        elif answer[0] == Answer.MORE_SLOTS:
            self.withheld[index] = "more slots are in use there than were named"
            self.slots = max(self.slots, min(answer[1], lock_answers.MAX_SLOTS))
        else:
            self.withheld[index] = f"it came back without what it knew, and has no vote for {answer[1] / 1000:.1f} s"


class RedlockStore:
    """A `Store` on several servers that do not know each other.

    Args:
        servers: the nodes, an odd number of them.
        shown: their URLs, for messages.
        memory: the key by which a node knows since when it remembers; None to trust nodes that came back empty.
    """

    def __init__(self, servers: Sequence[Server], shown: str, *, memory: str | None) -> None:
        self.server = shown
        self._nodes = [Node(server) for server in servers]
        self._quorum = len(servers) // 2 + 1
        self._memory = memory
        self._fans: deque[Fan] = deque()
        self._pid = os.getpid()
        self._owing = Owing(self._settle)
        #: Of the thread that settles.
        self._own: deque[Fan] = deque()
        self._is_closed = False

    def acquire(self, request: LockRequest) -> Lease | Held | Record:
        wanted = replace(request, owner=vote_commands.attempt_of(request.owner, 0))
        try:
            with self._fan() as fan:
                found = self._acquire(fan, wanted)
        except BaseException:
            # Interrupted (a time limit, a shutdown) between sending and reading.
            self.abandon(wanted.hold())
            raise
        if not isinstance(found, _Votes):
            return found
        holding = found.holder
        if holding is None or len(found.errors) + len(found.withheld) >= self._quorum:
            raise self._unavailable(found.errors | found.withheld)
        return holding

    def renew(self, holds: Sequence[Hold], *, timeout: float) -> list[bool]:
        """See `LockStore.renew`; `timeout` is that of connecting, and of the answers to all."""
        batches = [holds[start : start + BATCH] for start in range(0, len(holds), BATCH)]
        undecided = set(range(len(batches)))

        def is_decided(each: Sequence[Answers]) -> bool:
            for place in list(undecided):
                if len(self._renewed(batches[place], each[place])) == len(batches[place]):
                    undecided.discard(place)
            # Nor does it help to wait where most nodes have failed.
            return not undecided or all(self._has_failed(each[place]) for place in undecided)

        with self._fan() as fan:
            fan.connect(step=min(timeout, CONNECT), seconds=timeout)
            sent_at = clock.now()
            each = fan.ask_each([vote_commands.renew(batch) for batch in batches], is_decided, seconds=timeout)
            renewed: dict[Hold, bool] = {}
            for batch, answers in zip(batches, each, strict=True):
                renewed.update(self._renewed(batch, answers))
            for hold, ours in renewed.items():
                if ours and isinstance(hold, Lease):
                    hold.extend(sent_at)
            for batch, answers in zip(batches, each, strict=True):
                self._put_back(fan, batch, answers, renewed)
        if len(renewed) < len(holds):
            raise self._unavailable({index: told for answers in each for index, told in _errors(answers).items()})
        return [renewed[hold] for hold in holds]

    def free(self, hold: Hold, *, record: Record | None = None, reservation: Reservation | None = None) -> bool:
        call, answers = vote_commands.free(hold, record=record, reservation=reservation), {}
        most = len(self._nodes) - self._quorum
        for tries in range(TRIES):
            if tries:
                clock.sleep(chance.spread(RETRY_DELAY))
            answers = self._freed(hold, call, is_owed=not tries)
            ours, gone = _freed_on(answers)
            if ours + gone >= self._quorum:
                # Gone when it is said again: the first one worked.
                return tries > 0 or (ours > 0 and gone <= most)
        raise self._unavailable(_errors(answers))

    def abandon(self, hold: Hold) -> bool | None:
        answers: Answers = {}
        try:
            answers = self._freed(hold, vote_commands.abandon(hold), is_owed=True)
        except Exception as error:  # noqa: BLE001 - it is owed all the same
            logger.debug("redlock: %s: is taken back later: %s", hold.key, told(error))
        ours, gone = _freed_on(answers)
        return None if ours + gone < self._quorum else ours > 0 and gone <= len(self._nodes) - self._quorum

    def remember(self, key: str, record: Record) -> None:
        hold = Hold.of_nobody(key)
        try:
            self._freed(hold, vote_commands.free(hold, record=record), is_owed=True)
        except Exception as error:  # noqa: BLE001 - it is owed all the same
            logger.debug("redlock: %s: a record is left later: %s", hold.key, told(error))

    def refuse(self, key: str, holder: Holder, record: Record, *, limit: int = 1) -> Held | Record | None:
        slots = limit
        while True:
            try:
                return self._refuse(key, holder, record, slots)
            except lock_answers.MoreSlots as more:
                slots = more.slots

    def replace_records(self, records: Sequence[tuple[str, Record]]) -> None:
        for start in range(0, len(records), BATCH):
            self._majority(lock_commands.replace_records(records[start : start + BATCH]))

    def waiter(self, request: LockRequest) -> AskingWaiter:
        bell, waiting = _NodesBell(request.key, self._nodes, self.server), replace(request, waiting=True)
        return AskingWaiter(bell, lambda: self.acquire(waiting))

    def held(self, key: str, *, limit: int = 1) -> list[Held]:
        found = self._reachable(
            lambda server: [(key, held) for held in inspect.held(server, key, limit)], at_least=self._quorum
        )
        return [held for _, held in self._agreed(found)]

    def all_held(self, prefix: str) -> Iterator[tuple[str, Held]]:
        yield from self._agreed(
            self._reachable(lambda server: [*inspect.all_held(server, prefix)], at_least=self._quorum)
        )

    def inspect(self, key: str) -> KeyState:
        states = self._reachable(lambda server: inspect.inspect(server, key), at_least=self._quorum)
        records = {each.message: each for it in states for each in sorted(it.records, key=lambda each: each.seconds)}
        return KeyState(
            tuple(held for _, held in self._agreed([(key, held) for held in it.held] for it in states)),
            max((it.fence for it in states if it.fence is not None), default=None),
            max(it.waiters for it in states),
            tuple(sorted(records.values(), key=lambda each: each.seconds, reverse=True)[:MOST_RECORDS]),
        )

    def ledger(self, key: str) -> RedisLedger:
        def known() -> list[bytes]:
            return [
                entry for found in self._reachable(lambda server: [*inspect.entries(server, key)]) for entry in found
            ]

        return RedisLedger(key, self._majority, known, batch=BATCH, quorum=self._quorum)

    def journal(self, prefix: str, *, size: int) -> RedisJournal:
        return RedisJournal(prefix, size, self._first, self._reachable)

    def close(self) -> None:
        self._is_closed = True
        if self._pid != os.getpid():
            # Forked: the selectors of these are the parent's too, which would hear nothing any more.
            self._fans, self._own, self._pid = deque(), deque(), os.getpid()
        while self._fans:
            self._fans.pop().close()
        for node in self._nodes:
            node.server.close()

    def _refuse(self, key: str, holder: Holder, record: Record, slots: int) -> Held | Record | None:
        """Refuse the message, on a majority of the nodes that has promised so before."""
        errors: dict[int, str] = {}
        promise = record._replace(content=vote_commands.PROMISE + record.content, seconds=PROMISED)
        for tries in range(TRIES):
            if tries:
                clock.sleep(chance.spread(RETRY_DELAY))
            for each in (promise, record):
                answers = self._agreed_to(vote_commands.refuse(key, holder, each, slots=slots))
                found, errors = (
                    [lock_answers.refused(answer, record.message) for answer in _given(answers)],
                    _errors(answers),
                )
                if found.count(None) < self._quorum:
                    break
            else:
                return None
            with self._fan() as fan:
                fan.connect(step=CONNECT, seconds=CONNECT_ALL)
                for each in (promise, record):
                    fan.tell(vote_commands.take_back(key, each), range(len(self._nodes)), owed_for=PROMISED)
            against = [it for it in found if it is not None and not _is_promise(it)]
            if against and len(found) >= self._quorum:
                return next((it for it in against if isinstance(it, Record)), against[0])
        raise self._unavailable(errors)

    def _agreed_to(self, call: Call) -> Answers:
        """What the nodes answered, waited for until a majority has agreed, with a 1, or cannot any more.

        Not merely until a majority has answered: a node that the message's copy has, and that answers sooner than one
        of those that have promised, would have a refusal taken back that others have been told of.
        """

        def is_decided(given: Answers) -> bool:
            agreed = sum(1 for answer in _given(given) if answer[0] == Answer.GRANTED)
            return agreed >= self._quorum or len(given) - agreed > len(self._nodes) - self._quorum

        with self._fan() as fan:
            fan.connect(step=CONNECT, seconds=CONNECT_ALL)
            return fan.ask(call, is_decided, seconds=MAX_ANSWER)

    def _freed(self, hold: Hold, call: Call, *, is_owed: bool) -> dict[int, Any]:
        """What the nodes answered to freeing; those that have not are owed it, if this is the first try."""
        most = len(self._nodes) - self._quorum

        def is_decided(answers: Answers) -> bool:
            ours, gone = _freed_on(answers)
            return ours >= self._quorum or gone > most or self._has_failed(answers)

        with self._fan() as fan:
            fan.connect(step=CONNECT, seconds=CONNECT_ALL)
            answers = fan.ask(
                call, is_decided, seconds=_patience(hold.ttl), owed_for=max(hold.ttl, OWED) if is_owed else 0
            )
            if Freed.SOMEBODY_WAITS in answers.values():
                # Only now: who wakes while most nodes still hold the lock would find it held.
                fan.tell(lock_commands.wake(hold.key, limit=hold.limit), range(len(self._nodes)))
        return answers

    def _has_failed(self, answers: Answers) -> bool:
        """Whether so many nodes have failed that the others are no majority."""
        return len(answers) - len(_given(answers)) > len(self._nodes) - self._quorum

    def _majority(self, call: Call) -> list[Any]:
        """The answers of a majority at least."""
        errors: dict[int, str] = {}

        def is_decided(given: Answers) -> bool:
            return len(_given(given)) >= self._quorum or self._has_failed(given)

        for tries in range(TRIES):
            if tries:
                clock.sleep(chance.spread(RETRY_DELAY))
            with self._fan() as fan:
                fan.connect(step=CONNECT, seconds=CONNECT_ALL)
                answers = fan.ask(call, is_decided, seconds=MAX_ANSWER)
            if len(_given(answers)) >= self._quorum:
                return _given(answers)
            errors = _errors(answers)
        raise self._unavailable(errors)

    def _first(self, call: Call) -> Any:
        """The answer of the first node that gives one."""
        errors: dict[int, str] = {}
        until = clock.now() + READ_ALL
        for index, node in enumerate(self._nodes):
            if not node.is_resting and (left := until - clock.now()) > 0:
                try:
                    return node.server.run(call, step=min(node.server.step, left))
                except (RedisError, OSError) as error:
                    errors[index] = self._failed(node, error)
        raise self._unavailable(errors)

    def _reachable(self, reading: Callable[[Reader], T], *, at_least: int = 1) -> list[T]:
        """What each node shows that answers, one after the other; those that have failed a moment ago come last.

        Raises:
            LockUnavailable: fewer do than so many.
        """
        found: list[T] = []
        errors: dict[int, str] = {}
        spent = 0.0
        for index, node in sorted(enumerate(self._nodes), key=lambda pair: pair[1].is_resting):
            if node.is_resting and len(found) >= at_least:
                continue  # The others say enough.
            began = clock.now()
            try:
                found.append(reading(node.server))
            except (RedisError, OSError) as error:
                errors[index] = self._failed(node, error)
                spent += clock.now() - began
            if spent > READ_ALL or len(errors) > len(self._nodes) - at_least:
                break
        if len(found) < at_least:
            raise self._unavailable(errors)
        return found

    def _failed(self, node: Node, error: Exception) -> str:
        """What is told about an error; a node that did not answer is left alone for a while."""
        if isinstance(error, (ConnectionError, TimeoutError, OSError)):
            node.failed(error)
        return told(error)

    def _agreed(self, found: Iterable[Iterable[tuple[str, Held]]]) -> Iterator[tuple[str, Held]]:
        """What a majority of the nodes shows, of what each does."""
        by_owner: defaultdict[tuple[str, int | None, str], list[Held]] = defaultdict(list)
        for of_node in found:
            # A search may come upon a key twice.
            once = {(key, held.slot, vote_commands.attempt_of(held.owner, 0)): held for key, held in of_node}
            for place, held in once.items():
                by_owner[place].append(held)
        for (key, slot, owner), each in by_owner.items():
            if len(each) >= self._quorum:
                holder = next((held.holder for held in each if held.holder is not None), None)
                remaining, waiters = max(held.remaining for held in each), max(held.waiters for held in each)
                yield key, Held(holder, owner, remaining, slot, waiters)

    def _acquire(self, fan: Fan, wanted: LockRequest) -> Lease | Held | Record | _Votes:
        """What was found; the last votes where that is not clear."""
        unclear: _Votes | None = None
        slots = wanted.limit
        until = clock.now() + PATIENCE
        for tries in range(TRIES):
            if tries:
                if clock.now() > until:
                    break
                clock.sleep(chance.spread(RETRY_DELAY))
            fan.connect(step=CONNECT, seconds=CONNECT_ALL)
            unclear, holders = None, []
            for slot in range(wanted.limit):
                found = self._try(fan, wanted, slot, slots)
                if not isinstance(found, _Votes):
                    return found
                if found.slots > slots:
                    # Others had a higher limit; what they hold counts.
                    unclear, slots = found, found.slots
                    break
                if found.answered < self._quorum:
                    unclear = found
                    break  # Another slot would fare no better.
                if (holder := found.holder) is None or not found.is_held:
                    unclear = found
                elif _is_copy(wanted, holder):
                    return holder
                else:
                    holders.append(holder)  # Or it is ours, or kept for us, in another slot.
            if unclear is None:
                return min(holders, key=lambda held: held.remaining)
        return unclear or _Votes(self._quorum, wanted.holder.message)

    def _try(self, fan: Fan, wanted: LockRequest, slot: int, slots: int) -> Lease | Record | _Votes:
        """One attempt; nothing is left of it unless it gives a lease."""
        attempt = vote_commands.attempt_of(wanted.owner, chance.randrange(1, vote_commands.ATTEMPTS))
        call = vote_commands.vote(replace(wanted, owner=attempt), slot=slot, slots=slots, memory=self._memory)
        sent_at = clock.now()
        answers = fan.ask(call, self._is_decided, seconds=_patience(wanted.ttl))
        votes = _Votes.of(answers, self._quorum, wanted.holder.message)
        if votes.has_majority and votes.record is None:
            fence = self._fence(fan, wanted, slot, [*votes.granted.values()])
            if fence and clock.now() - sent_at < wanted.ttl / 3:
                return wanted.lease(fence=fence, sent_at=sent_at, slot=slot)
        not_granted = {*votes.held, *votes.withheld, *votes.unasked}
        maybe = [index for index in range(len(self._nodes)) if index not in not_granted]
        fan.tell(
            vote_commands.undo(Hold(wanted.key, wanted.owner, ttl=wanted.ttl, limit=wanted.limit, slot=slot), attempt),
            maybe,
            owed_for=max(wanted.ttl, OWED),
        )
        return votes.record or votes

    def _is_decided(self, answers: Answers) -> bool:
        """Whether the other nodes' votes cannot change anything."""
        granted = 0
        for answer in answers.values():
            if isinstance(answer, list):
                if answer[0] == Answer.RECORD:
                    return True
                granted += answer[0] == Answer.GRANTED
        return granted >= self._quorum or granted + len(self._nodes) - len(answers) < self._quorum

    def _fence(self, fan: Fan, wanted: LockRequest, slot: int, fences: Sequence[int]) -> int | None:
        """A token that any later majority counts beyond; None if that could not be made sure."""
        fence = max(fences)
        if fences.count(fence) >= self._quorum:
            return fence
        call = vote_commands.raise_fence(wanted.key, wanted.owner, slot=slot, fence=fence, ttl=wanted.ttl)
        most = len(self._nodes) - self._quorum

        def is_decided(answers: Answers) -> bool:
            return (raised := [*answers.values()].count(1)) >= self._quorum or len(answers) - raised > most

        answers = fan.ask(call, is_decided, seconds=_patience(wanted.ttl))
        return fence if [*answers.values()].count(1) >= self._quorum else None

    def _renewed(self, batch: Sequence[Hold], answers: Answers) -> dict[Hold, bool]:
        """Which holds are still ours and which are not; those for which that is not clear are left out."""
        most = len(self._nodes) - self._quorum
        each = [lock_commands.renewed(batch, answer) for answer in answers.values() if isinstance(answer, list)]
        if len(each) < self._quorum:
            return {}
        votes = {hold: sum(ours) for hold, *ours in zip(batch, *each, strict=True)}
        return {
            hold: ours >= self._quorum
            for hold, ours in votes.items()
            if ours >= self._quorum or len(each) - ours > most
        }

    def _put_back(self, fan: Fan, batch: Sequence[Hold], answers: Answers, renewed: Mapping[Hold, bool]) -> None:
        """Give each node the holds that it lacks and a majority has, for the next time."""
        for index, answer in answers.items():
            if not isinstance(answer, list):
                continue
            lost = [
                hold
                for hold, ours in zip(batch, lock_commands.renewed(batch, answer), strict=True)
                if not ours and renewed.get(hold) and hold.slot is not None
            ]
            if lost:
                fan.tell(vote_commands.put_back(lost), [index])

    @contextmanager
    def _fan(self) -> Iterator[Fan]:
        """A connection to each node, for this thread; what is owed afterwards is seen to."""
        if self._pid != os.getpid():
            # Forked: these sockets are the parent's, and so is what it owes.
            self._fans, self._own, self._pid = deque(), deque(), os.getpid()
        self._is_closed = False
        try:
            fan = self._fans.pop()
        except IndexError:
            fan = Fan(self._nodes)
        try:
            yield fan
        except BaseException:
            fan.close()
            self._see_to_debts()
            raise
        is_behind = fan.rest()
        self._fans.append(fan)
        self._see_to_debts(is_behind)

    def _see_to_debts(self, is_behind: bool = False) -> None:
        if is_behind or any(node.owes for node in self._nodes):
            self._owing.begin()

    def _settle(self) -> bool:
        """Have the nodes hear what they are owed; whether something is left."""
        is_behind = self._collect()
        if any(node.owes for node in self._nodes):
            # Not on one of the others, which somebody may need while this one waits for a node.
            fan = self._own.pop() if self._own else Fan(self._nodes)
            with _closed_if_it_fails(fan):
                fan.connect(step=CONNECT, seconds=CONNECT_ALL)
            self._own.append(fan)
        for _ in range(len(self._own)):
            fan = self._own.popleft()
            fan.collect()
            # Closed any sooner, it would take what is under way with it.
            if fan.is_owing or any(node.owes for node in self._nodes):
                is_behind = True
                self._own.append(fan)
            else:
                fan.close()
        if self._is_closed and not is_behind:
            self.close()
        return is_behind

    def _collect(self) -> bool:
        """Take note of what has arrived for fans that nobody uses; whether a node is behind with one."""
        is_behind = False
        for _ in range(len(self._fans)):
            try:
                # Those that have not been used for long are on the left.
                if not self._fans[0].has_rested:
                    return True
                fan = self._fans.popleft()
            except IndexError:
                break
            with _closed_if_it_fails(fan):
                is_behind |= fan.rest()
            self._fans.append(fan)
        return is_behind

    def _unavailable(self, errors: dict[int, str]) -> LockUnavailable:
        """Say what was wrong with which node; one that is not among the errors did not answer in time, or did."""
        failed = "; ".join(f"{self._nodes[index].server}: {error}" for index, error in sorted(errors.items()))
        return LockUnavailable(
            self.server, f"no majority: {self._quorum} of {len(self._nodes)} nodes are needed; {failed or 'no answer'}"
        )


class _NodesBell(RedisBell):
    """A bell on the first node that is well, in an order that is the same for all who wait for a lock."""

    def __init__(self, key: str, nodes: Sequence[Node], shown: str) -> None:
        super().__init__(key, lambda: self._node().server, shown)
        first = zlib.crc32(key.encode()) % len(nodes)
        self._order = [*nodes[first:], *nodes[:first]]

    def wait(self, timeout: float) -> Any:
        node = self._node()
        try:
            super().wait(timeout)
        except LockUnavailable as error:
            # The next look finds another node, or that there is no majority.
            node.failed(error)
            clock.sleep(min(timeout, MIN_ANSWER))

    def _node(self) -> Node:
        return next((node for node in self._order if not node.is_resting), self._order[0])


def _is_copy(wanted: LockRequest, held: Held) -> bool:
    """Whether another copy of this message has the lock: not this owner, nor is it reserved for this message."""
    if held.owner in (wanted.owner, vote_commands.attempt_of(wanted.holder.reserved_as, 0)):
        return False
    return held.holder is not None and held.holder.is_copy_of(wanted.holder)


def _is_promise(found: Held | Record) -> bool:
    return isinstance(found, Record) and found.content.startswith(vote_commands.PROMISE)


@contextmanager
def _closed_if_it_fails(fan: Fan) -> Iterator[None]:
    try:
        yield
    except BaseException:
        fan.close()
        raise


def _freed_on(answers: Answers) -> tuple[int, int]:
    """On how many nodes a release found the lock, and on how many it did not."""
    given = _given(answers)
    return sum(answer != Freed.NOT_OURS for answer in given), given.count(Freed.NOT_OURS)


def _given(answers: Answers) -> list[Any]:
    return [answer for answer in answers.values() if not isinstance(answer, Exception)]


def _errors(answers: Answers) -> dict[int, str]:
    return {index: told(answer) for index, answer in answers.items() if isinstance(answer, Exception)}


def _patience(ttl: float) -> float:
    """Seconds that the nodes get to answer."""
    return min(max(ttl * ANSWER_SHARE, MIN_ANSWER), MAX_ANSWER)
