"""A store on a majority of independent servers.

In addition to `docs/protocol.md`, section 10: one connection per node carries everything in order, so that taking back
never overtakes a late acquire; and one node wakes the waiters of a lock, the same for all of them while that node is
well.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from celery.utils.log import get_logger
from redis.exceptions import RedisError

from celery_singleton_lock import clock, trust
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.base import Freeing, Held, LockRequest, Record, Reservation
from celery_singleton_lock.stores.redis import inspect, lock_answers, lock_commands
from celery_singleton_lock.stores.redis.journal import RedisJournal
from celery_singleton_lock.stores.redis.ledger import RedisLedger
from celery_singleton_lock.stores.redis.lock_answers import Answer, FreeAnswer
from celery_singleton_lock.stores.redis.redlock import commands
from celery_singleton_lock.stores.redis.redlock.conversation import Answers, Conversation
from celery_singleton_lock.stores.redis.redlock.majority import agreed, merged
from celery_singleton_lock.stores.redis.redlock.node import Node
from celery_singleton_lock.stores.redis.redlock.nodes import (
    CONNECT,
    CONNECT_ALL,
    MAX_ANSWER,
    Nodes,
    errors_of,
    given,
    tries,
)
from celery_singleton_lock.stores.redis.redlock.votes import Votes
from celery_singleton_lock.stores.redis.script import Call, batches
from celery_singleton_lock.stores.redis.server import Server, words_of
from celery_singleton_lock.stores.redis.waiter import RedisWakeUp
from celery_singleton_lock.stores.store import KeyState
from celery_singleton_lock.stores.waiters import AskingWaiter

logger = get_logger(__name__)

#: Seconds after which no new try to get a majority is begun.
PATIENCE = 3.0

#: The least seconds for which the end of a hold, or of an attempt, is repeated: earlier calls may arrive as late.
REPEAT_FOR = 600.0

#: The most seconds to wait for the other nodes when a majority has refused the lock or renewed it; and the most of a
#: ttl if it was renewed: a node that is always last, being farther away, would not get back what it lacks.
FARTHER, FARTHER_SHARE = 0.1, 1 / 100

#: Seconds for which a node promises to refuse a message: as long as the record may be under way to one of the nodes.
PROMISED = 30.0


class RedlockStore:
    """A `Store` on several servers that do not know each other.

    Args:
        servers: the nodes, an odd number of them.
        server: their URLs, for messages.
        memory: the key that says since when a node remembers; None to trust nodes that came back empty.
    """

    def __init__(self, servers: Sequence[Server], server: str, *, memory: str | None) -> None:
        self.server = server
        self._nodes = Nodes(servers, server)
        self._memory = memory
        self._is_agreed = self._nodes.decided_by(lambda answer: _kind(answer) == Answer.GRANTED)

    def acquire(self, request: LockRequest) -> Lease | Held | Record:
        try:
            with self._nodes.conversation() as conversation:
                found = self._acquire(conversation, request)
        except BaseException:
            # Interrupted (a time limit, a shutdown) between sending and reading.
            request.late = True
            if request.another is not None:
                self.abandon(request.hold())
            raise
        if not isinstance(found, Votes):
            return found
        holding = found.holder
        # If no majority has one owner, the nodes without a vote decide: what was freed may be left on the others.
        if holding is None or not (found.is_held or found.voted == len(self._nodes.each)):
            raise self._nodes.unavailable(found.errors | found.withheld)
        return holding

    def renew(self, holds: Sequence[Hold], *, timeout: float) -> list[bool]:
        """See `Store.renew`; `timeout` is that of connecting, and of the answers to all."""
        parts = [*batches(holds)]
        undecided = set(range(len(parts)))

        def is_decided(each: Sequence[Answers]) -> bool:
            for place in list(undecided):
                if len(self._renewed(parts[place], each[place])) == len(parts[place]):
                    undecided.discard(place)
            # Waiting does not help either if most nodes have failed.
            return not undecided or all(self._nodes.has_failed(each[place]) for place in undecided)

        with self._nodes.conversation(step=min(timeout, CONNECT), seconds=timeout) as conversation:
            sent_at, ttls = clock.now(), {hold: hold.ttl for hold in holds}  # A lease may get another one meanwhile.
            calls = [lock_commands.renew(batch) for batch in parts]
            linger = min(FARTHER, FARTHER_SHARE * min((hold.ttl for hold in holds), default=0.0))
            each = conversation.ask_each(calls, is_decided, seconds=timeout, linger=lambda _: linger)
            renewed: dict[Hold, bool] = {}
            for batch, answers in zip(parts, each, strict=True):
                renewed.update(self._renewed(batch, answers))
            for hold, ours in renewed.items():
                if ours and isinstance(hold, Lease):
                    hold.extend(sent_at, ttls[hold])
            lost: defaultdict[int, list[Hold]] = defaultdict(list)
            for batch, answers in zip(parts, each, strict=True):
                for index, answer in answers.items():
                    lost[index] += _lost(batch, answer, renewed)
            if any(lost.values()):
                self._put_back(conversation, lost, seconds=min(timeout, MAX_ANSWER))
        if len(renewed) < len(holds):
            raise self._nodes.unavailable({index: words for it in each for index, words in errors_of(it).items()})
        return [renewed[hold] for hold in holds]

    def free(self, hold: Hold, *, record: Record | None = None, reservation: Reservation | None = None) -> Freeing:
        answers: Answers = {}
        call = commands.free(hold, record=record, reservation=reservation)
        for number in tries():
            answers = self._freed(hold, call, repeats=number == 0)
            ours, gone = _freed_on(answers)
            if ours >= self._nodes.quorum:
                return Freeing.NOW
            if ours + gone >= self._nodes.quorum:
                # Gone when the call is repeated: the first one worked.
                is_said_again = number > 0 or hold.ending
                is_perhaps_ours = is_said_again or (ours > 0 and gone <= self._nodes.spare)
                return Freeing.UNCLEAR if is_perhaps_ours else Freeing.NOT_OURS
        hold.ending = True
        raise self._nodes.unavailable(errors_of(answers))

    def abandon(self, hold: Hold) -> bool | None:
        ours, gone = _freed_on(self._said(hold, commands.abandon(hold)))
        return None if ours + gone < self._nodes.quorum else ours > 0 and gone <= self._nodes.spare

    def remember(self, key: str, record: Record) -> None:
        hold = Hold.of_nobody(key)
        self._said(hold, commands.free(hold, record=record))

    def refuse(self, key: str, holder: Holder, record: Record) -> Held | Record | None:
        sent: list[Record] = []
        try:
            return self._refuse(key, holder, record, sent)
        finally:
            for promise in () if record in sent else sent:
                # Interrupted before the record was sent: the next call would find the promise.
                self._nodes.repeat(commands.take_back(key, promise), PROMISED, but=())

    def replace_records(self, records: Sequence[tuple[str, Record]]) -> None:
        for batch in batches(records):
            self._nodes.majority(lock_commands.replace_records(batch))

    def waiter(self, request: LockRequest) -> AskingWaiter:
        request.waiting = True

        def leave(free: bool) -> None:
            if free:
                self.abandon(request.hold())

        wake_up = _NodesWakeUp(request.key, self._nodes.each, self.server)
        return AskingWaiter(wake_up, lambda: self.acquire(request), leave)

    def held(self, key: str) -> list[Held]:
        quorum = self._nodes.quorum
        each = self._nodes.read(lambda server: [(key, held) for held in inspect.held(server, key)], at_least=quorum)
        return [held for _, held in agreed(each, quorum)]

    def all_held(self, prefix: str) -> Iterator[tuple[str, Held]]:
        quorum = self._nodes.quorum
        each = self._nodes.read(lambda server: [*inspect.all_held(server, prefix)], at_least=quorum)
        yield from agreed(each, quorum)

    def inspect(self, key: str) -> KeyState:
        quorum = self._nodes.quorum
        return merged(self._nodes.read(lambda server: inspect.inspect(server, [server], key), at_least=quorum), quorum)

    def recorded(self, key: str, message: str) -> Record | None:
        """See `Store.recorded`. What one node remembers has happened, as for an acquire."""
        call = lock_commands.recorded(key, message)
        each = self._nodes.read(
            lambda it: lock_answers.parse_record(it.run(call), message), at_least=self._nodes.quorum
        )
        return next((found for found in each if found is not None), None)

    def place_of(self, key: str) -> None:
        return None

    def wake(self, key: str) -> None:
        """Does nothing: executions wait only in their slots, and look by themselves."""

    def ledger(self, key: str) -> RedisLedger:
        def known() -> list[tuple[bytes, int]]:
            return [entry for found in self._nodes.read(lambda it: [*inspect.entries(it, key)]) for entry in found]

        return RedisLedger(key, self._nodes.majority, known, quorum=self._nodes.quorum)

    def wake_ups(self) -> None:
        """None: each node would wake another one first."""

    def journal(self, prefix: str, *, size: int) -> RedisJournal:
        return RedisJournal(prefix, size, self._nodes.first, self._nodes.read)

    def close(self) -> None:
        self._nodes.close()

    def _acquire(self, conversation: Conversation, request: LockRequest) -> Lease | Held | Record | Votes:
        """What was found; the last votes if that is not clear."""
        found: Lease | Record | Votes = Votes(self._nodes.quorum, request.holder.message)
        for number in tries(within=PATIENCE):
            if request.late:
                if request.another is None:
                    break
                request.give_up(request.another())
            if number:
                conversation.connect(step=CONNECT, seconds=CONNECT_ALL)
            found = self._try(conversation, request)
            if not isinstance(found, Votes):
                return found
            if found.is_given_up:
                break
            if found.is_held and (holder := found.holder) is not None:
                return holder
        return found

    def _try(self, conversation: Conversation, request: LockRequest) -> Lease | Record | Votes:
        """Ask once; nothing is left of it unless it gives a lease.

        A request that was given up may arrive when the next one is under way: neither it nor its undoing may touch what
        the next one has got. So each has an owner of its own, unless no node can have granted the one before.
        """
        call = commands.vote(request, memory=self._memory)
        sent_at, request.late = clock.now(), True
        answers = conversation.ask(call, self._is_decided, seconds=_patience(request.ttl), linger=self._linger)
        votes = Votes.of(answers, self._nodes.quorum, request.holder.message)
        if votes.has_majority and votes.record is None:
            fence = self._fence(conversation, request, votes.granted)
            if fence and trust.came_in_time(sent_at, request.ttl):
                request.late = False
                return request.lease(fence=fence, sent_at=sent_at)
        if request.another is None:
            return votes.record or votes
        asked = [index for index in range(len(self._nodes.each)) if index not in votes.unasked]
        if len(votes.held) + len(votes.withheld) < len(asked):
            undo = lock_commands.undo(request, wakes=False)
            conversation.send(undo, asked, repeat_for=max(request.ttl, REPEAT_FOR))
        else:
            request.late = False
        return votes.record or votes

    def _is_decided(self, answers: Answers) -> bool:
        """Whether the other nodes' votes cannot change anything."""
        # A promise is one vote: on a minority, it keeps nobody from the lock.
        if any(_is_recorded(answer) for answer in answers.values()):
            return True
        if not self._is_agreed(answers):
            return False
        votes = Votes.of(answers, self._nodes.quorum, "")
        return votes.has_majority or votes.is_held or len(answers) == len(self._nodes.each)

    def _linger(self, answers: Answers) -> float:
        """How long to wait for the other votes: if all nodes refuse the lock, nothing is left to undo."""
        kinds = [_kind(answer) for answer in answers.values()]
        is_granted = kinds.count(Answer.GRANTED) >= self._nodes.quorum
        return 0.0 if is_granted or any(map(_is_recorded, answers.values())) else FARTHER

    def _fence(self, conversation: Conversation, wanted: LockRequest, fences: Sequence[int]) -> int | None:
        """A token that any later majority counts beyond; None if that could not be ensured."""
        fence, quorum = max(fences), self._nodes.quorum
        if fences.count(fence) >= quorum:
            return fence
        call = commands.raise_fence(wanted.key, wanted.owner, fence=fence)
        is_decided = self._nodes.decided_by(lambda answer: answer == 1)
        answers = conversation.ask(call, is_decided, seconds=_patience(wanted.ttl))
        return fence if [*answers.values()].count(1) >= quorum else None

    def _renewed(self, batch: Sequence[Hold], answers: Answers) -> dict[Hold, bool]:
        """Which holds are still held and which are not; those for which that is not clear are left out."""
        each = [lock_commands.renewed(batch, answer) for answer in answers.values() if isinstance(answer, list)]
        if len(each) < self._nodes.quorum:
            return {}
        votes = {hold: sum(ours) for hold, *ours in zip(batch, *each, strict=True)}
        return {
            hold: ours >= self._nodes.quorum
            for hold, ours in votes.items()
            if ours >= self._nodes.quorum or len(each) - ours > self._nodes.spare
        }

    def _put_back(self, conversation: Conversation, lost: Mapping[int, Sequence[Hold]], *, seconds: float) -> None:
        """Give each node the holds that it lacks, for the next time, with the holders that others know.

        Without its holder, a copy of its message would take it for another task's, and be refused.
        """
        parts = [*batches([*dict.fromkeys(hold for of_node in lost.values() for hold in of_node)])]

        def is_known(each: Sequence[Answers]) -> bool:
            return all(len(_with_holders(*pair)) == len(pair[0]) for pair in zip(parts, each, strict=True))

        each = conversation.ask_each([commands.values(part) for part in parts], is_known, seconds=seconds)
        values: dict[Hold, bytes] = {}
        for part, answers in zip(parts, each, strict=True):
            values.update(_with_holders(part, answers))
        for index, of_node in lost.items():
            for batch in batches(of_node):
                conversation.send(commands.put_back(batch, values), [index])

    def _said(self, hold: Hold, call: Call) -> Answers:
        """As `_freed`, without an error."""
        try:
            return self._freed(hold, call, repeats=True)
        except (RedisError, OSError) as error:
            logger.debug("redlock: %s: a release or the end of a message is sent later: %s", hold.key, words_of(error))
            return {}

    def _freed(self, hold: Hold, call: Call, *, repeats: bool) -> Answers:
        """The nodes' answers to freeing; if it `repeats`, it is sent again to nodes that have not answered."""

        def is_decided(answers: Answers) -> bool:
            ours, gone = _freed_on(answers)
            return ours >= self._nodes.quorum or gone > self._nodes.spare or self._nodes.has_failed(answers)

        repeat_for = max(hold.ttl, REPEAT_FOR) if repeats else 0.0
        settled: set[int] = set()
        try:
            with self._nodes.conversation() as conversation:
                answers = conversation.ask(
                    call, is_decided, seconds=_patience(hold.ttl), repeat_for=repeat_for, settled=settled
                )
                if FreeAnswer.SOMEBODY_WAITS in answers.values():
                    # Only now: a waiter that wakes while most nodes still hold the lock would find it held.
                    wake = lock_commands.wake(hold.key, limit=1)
                    conversation.send(wake, range(len(self._nodes.each)))
        except BaseException:
            if repeats:  # Interrupted, maybe before it was sent.
                hold.ending = True
                self._nodes.repeat(call, repeat_for, but=settled)
            raise
        return answers

    def _refuse(self, key: str, holder: Holder, record: Record, sent: list[Record]) -> Held | Record | None:
        """Refuse the message, on a majority of nodes that have promised that before.

        `sent` has the promise, and the record if that was sent: a copy may have recorded the same, which must stay.
        """
        answers: Answers = {}
        for _ in tries():
            if not sent:
                sent.append(commands.promise_of(record, PROMISED))
            promise = sent[0]
            with self._nodes.conversation() as conversation:
                for each in (promise, record):
                    is_promised = each is record
                    call = commands.refuse(key, holder, each, promise=promise if is_promised else None)
                    repeat_for = PROMISED if is_promised else 0.0
                    answers = self._agreed(conversation, call, each, sent, repeat_for)
                    kinds = [*map(_kind, given(answers))]
                    if kinds.count(Answer.GRANTED) < self._nodes.quorum:
                        break
                else:
                    return None
                against = len(kinds) - kinds.count(Answer.GRANTED)
                was_recorded = record in sent
                if was_recorded and against <= self._nodes.spare:
                    # Silence is not an objection: a majority may have the record, with a node that is late, and others
                    # have seen it; or what is there is another copy's refusal, which looks the same.
                    continue
                # What nobody has answered in time, too: the next call of this message would find the promise.
                self._take_back(conversation, key, sent, answers)
                if len(kinds) < self._nodes.quorum:
                    continue
            found = [lock_answers.parse_refusal(it, record.message) for it in given(answers) if not _says_nothing(it)]
            objections = [it for it in found if it is not None and not _is_promise(it)]
            if objections:
                return next((it for it in objections if isinstance(it, Record)), objections[0])
            if was_recorded:
                break  # It is always the same: what takes it back may arrive after it is sent again.
        raise self._nodes.unavailable(errors_of(answers))

    def _agreed(
        self, conversation: Conversation, call: Call, each: Record, sent: list[Record], repeat_for: float
    ) -> Answers:
        """The nodes' answers to one step of a refusal, which `sent` has from now on."""
        settled: set[int] = set()
        try:
            if each not in sent:
                sent.append(each)
            # Not merely until a majority has answered: if a node where the message's copy has the lock answers sooner
            # than one that has promised, a refusal that others have already seen would be taken back.
            return conversation.ask(call, self._is_agreed, seconds=MAX_ANSWER, repeat_for=repeat_for, settled=settled)
        except BaseException:
            if repeat_for:  # Interrupted: a record that some nodes have ends the message for some copies only.
                self._nodes.repeat(call, repeat_for, but=settled)
            raise

    def _take_back(self, conversation: Conversation, key: str, sent: list[Record], answers: Answers) -> None:
        """Forget what was sent. What is promised next has another name: this may arrive after it, on its own way."""
        promise, *recorded = sent
        everywhere = range(len(self._nodes.each))
        conversation.send(commands.take_back(key, promise), everywhere, repeat_for=PROMISED)
        # Not where a node objects, as most do: it does not have the record, and may get the same one from a copy.
        maybe = [index for index in everywhere if not _objects(answers.get(index))]
        for record in recorded:
            conversation.send(commands.take_back(key, record), maybe, repeat_for=PROMISED)
        sent.clear()


class _NodesWakeUp(RedisWakeUp):
    """A wake-up from the first node that is well, in an order that is the same for all waiters of a lock."""

    def __init__(self, key: str, nodes: Sequence[Node], server: str) -> None:
        super().__init__(key, lambda: self._node().server, server)
        first = zlib.crc32(key.encode()) % len(nodes)
        self._order = [*nodes[first:], *nodes[:first]]

    def wait(self, timeout: float) -> Any:
        node = self._node()
        try:
            return super().wait(timeout)
        except LockUnavailable as error:
            # The next question finds another node, or that there is no majority.
            node.failed(error)
            clock.sleep(min(timeout, trust.MIN_ANSWER))
            return None

    def _node(self) -> Node:
        return next((node for node in self._order if not node.is_avoided), self._order[0])


def _lost(batch: Sequence[Hold], answer: Any, renewed: Mapping[Hold, bool]) -> list[Hold]:
    """The holds that a node lacks, by its answer, and a majority has."""
    if not isinstance(answer, list):
        return []
    each = zip(batch, lock_commands.renewed(batch, answer), strict=True)
    return [hold for hold, ours in each if not ours and renewed.get(hold)]


def _with_holders(holds: Sequence[Hold], answers: Answers) -> dict[Hold, bytes]:
    """What the nodes keep for these holds, as far as one of them knows the holder."""
    each = [pair for values in given(answers) for pair in zip(holds, values, strict=True)]
    return {hold: value for hold, value in each if _is_with_holder(value, hold.owner.encode())}


def _is_with_holder(value: bytes, owner: bytes) -> bool:
    return value != owner and value.startswith(owner)


def _kind(answer: Any) -> Any:
    """What an answer to a vote or a refusal begins with; None for an error."""
    return None if isinstance(answer, Exception) else answer[0]


def _freed_on(answers: Answers) -> tuple[int, int]:
    """On how many nodes the lock was held, and on how many it was not."""
    each = given(answers)
    gone = each.count(FreeAnswer.NOT_OURS)
    return len(each) - gone, gone


def _is_recorded(answer: Any) -> bool:
    """Whether the answer to a vote is the message's end."""
    return bool(_kind(answer) == Answer.RECORD and not answer[1].startswith(commands.PROMISE))


def _objects(answer: Any) -> bool:
    """Whether the answer to a refusal is no; silence is not."""
    return answer is not None and _kind(answer) not in (None, Answer.GRANTED)


def _says_nothing(answer: Any) -> bool:
    """Whether a refusal was not even tried."""
    return bool(_kind(answer) == Answer.GIVEN_UP)


def _is_promise(found: Held | Record) -> bool:
    return isinstance(found, Record) and found.content.startswith(commands.PROMISE)


def _patience(ttl: float) -> float:
    return min(max(ttl * trust.ANSWER_SHARE, trust.MIN_ANSWER), MAX_ANSWER)
