"""Redlock: locks on a majority of independent Redis servers, so that no single failure or failover grants one twice.

`nodes.py` asks the nodes; here is what their answers mean. Protocol: `docs/protocol.md`, section 10.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from celery.utils.log import get_logger

from celery_singleton_lock import trust
from celery_singleton_lock.errors import LockUnavailable, NewNodes
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.base import Freeing, Held, LockRequest, Record, Reservation
from celery_singleton_lock.stores.redis import lock_answers, lock_commands
from celery_singleton_lock.stores.redis.common import FARTHER, Answers, CommonStore, Enough
from celery_singleton_lock.stores.redis.journal import RedisJournal
from celery_singleton_lock.stores.redis.lock_answers import NOT_OURS, PROMISE, Answer
from celery_singleton_lock.stores.redis.mailbox import RedisMailbox
from celery_singleton_lock.stores.redis.nodes import MAX_ANSWER, Nodes, NotAsked, at_once, tries
from celery_singleton_lock.stores.redis.script import Call, batches, ms
from celery_singleton_lock.stores.redis.server import Server, words_of

logger = get_logger(__name__)

Item = TypeVar("Item")
T = TypeVar("T")

#: Seconds after which no new try to get a majority is begun.
PATIENCE = 3.0

#: The least seconds for which the end of a hold, or of an attempt, is repeated: earlier calls may arrive as late.
REPEAT_FOR = 600.0

#: Seconds for which a node promises to refuse a message: as long as the record may be under way to one of the nodes.
PROMISED = 30.0


class Votes:
    """What the answers to a `vote` mean.

    Args:
        answers: of the nodes.
        nodes: all of them.
        message: the message that the lock was asked for.

    Attributes:
        granted: the fences of the nodes that granted it.
        held: the holder on each node where it is held.
        record: the message's record, if one was found.
        new: seconds until nodes without memory vote.
        reasons: why a node has no vote, by its index.
        is_given_up: whether somebody has given the owner up.
    """

    def __init__(self, answers: Answers, nodes: Nodes, message: str) -> None:
        self._nodes = nodes
        self.granted: list[int] = []
        self.held: list[Held] = []
        self.record: Record | None = None
        self.new: list[float] = []
        self.reasons: dict[int, str] = {}
        self.is_given_up = False
        for index, answer in answers.items():
            if isinstance(answer, Exception):
                self.reasons[index] = words_of(answer)
                continue
            kind, *rest = answer
            if kind == Answer.GRANTED:
                self.granted.append(rest[0])
            elif kind == Answer.HELD:
                self.held.append(lock_answers.parse_held(rest[0], rest[1]))
            elif kind == Answer.RECORD and rest[0].startswith(PROMISE):
                # One vote against it: on a minority, it keeps nobody from the lock.
                self.reasons[index] = "the message is being refused"
            elif kind == Answer.RECORD:
                self.record = lock_answers.record(message, *rest)
            elif kind == Answer.GIVEN_UP:
                self.reasons[index], self.is_given_up = "the owner was given up", True
            else:
                self.new.append(rest[0] / 1000)
                self.reasons[index] = f"it came back without its data, and has no vote for {self.new[-1]:.1f} s"

    @property
    def has_majority(self) -> bool:
        return len(self.granted) >= self._nodes.quorum

    @property
    def is_held(self) -> bool:
        """Whether one owner is known to have a majority."""
        return any(count >= self._nodes.quorum for count in self._owners().values())

    def holder(self) -> Held:
        """Who has the lock.

        Raises:
            LockUnavailable: that is not known. If no majority has one owner, the nodes without a vote decide: what was
                freed may be left on the others.
        """
        if not self.held or not (self.is_held or len(self.granted) + len(self.held) == len(self._nodes.each)):
            error = self._nodes.unavailable(self.reasons)
            raise NewNodes(error.server, error.reason) if self.new else error
        owner = self._owners().most_common(1)[0][0]
        of_owner = [held for held in self.held if held.owner == owner]
        holder = next((held.holder for held in of_owner if held.holder is not None), None)
        return Held(holder, owner, max(held.remaining for held in of_owner))

    def _owners(self) -> Counter[str]:
        return Counter(held.owner for held in self.held)


class RedlockStore(CommonStore):
    """A `Store` on several servers that do not know each other.

    Args:
        servers: the nodes, an odd number of them.
        server: their URLs, for messages.
        memory: the key that says since when a node remembers; None to trust nodes that came back empty.
    """

    def __init__(self, servers: Sequence[Server], server: str, *, memory: str | None) -> None:
        self._nodes = Nodes(servers, server)
        mailbox = RedisMailbox(lambda _: self._well(), server)
        super().__init__(server, mailbox, quorum=self._nodes.quorum, spare=self._nodes.spare)
        self._memory = memory

    def acquire(self, request: LockRequest) -> Lease | Held | Record:
        found: Lease | Record | Votes = Votes(Answers(), self._nodes, "")
        try:
            for _ in tries(within=PATIENCE):
                if request.late:
                    if request.another is None:
                        break
                    request.give_up(request.another())
                found = self._try(request)
                if not isinstance(found, Votes) or found.is_given_up or found.is_held:
                    break
        except BaseException:
            # Interrupted (a time limit, a shutdown) between sending and reading.
            request.late = True
            if request.another is not None:
                self.abandon(request.hold())
            raise
        return found.holder() if isinstance(found, Votes) else found

    def free(self, hold: Hold, *, record: Record | None = None, reservation: Reservation | None = None) -> Freeing:
        answers = Answers()
        call = lock_commands.free(hold, record=record, reservation=reservation, for_good=True)
        for number in tries():
            answers = self._freed(hold, call, repeats=number == 0)
            ours, gone = _freed_on(answers)
            if ours >= self._quorum:
                return Freeing.NOW
            if ours + gone >= self._quorum:
                # Gone when the call is repeated: the first one worked.
                is_said_again = number > 0 or hold.ending
                is_perhaps_ours = is_said_again or (ours > 0 and gone <= self._spare)
                return Freeing.UNCLEAR if is_perhaps_ours else Freeing.NOT_OURS
        hold.ending = True
        raise self._nodes.unavailable(answers.errors)

    def abandon(self, hold: Hold) -> bool | None:
        ours, gone = _freed_on(self._freed(hold, lock_commands.abandon(hold), repeats=True))
        return None if ours + gone < self._quorum else ours > 0 and gone <= self._spare

    def remember(self, key: str, record: Record) -> None:
        hold = Hold.of_nobody(key)
        self._freed(hold, lock_commands.free(hold, record=record, for_good=True), repeats=True)

    def refuse(self, key: str, holder: Holder, record: Record) -> Held | Record | None:
        sent: list[Record] = []
        try:
            return self._refuse(key, holder, record, sent)
        finally:
            for promise in () if record in sent else sent:
                # Interrupted before the record was sent: the next call would find the promise.
                self._nodes.repeat(lock_commands.take_back(key, promise), PROMISED)

    def replace_records(self, records: Sequence[tuple[str, Record]]) -> None:
        for batch in batches(records):
            self._majority(lock_commands.replace_records(batch))

    def _well(self) -> Server:
        """The node on which this process reads its mailbox."""
        return next((node for node in self._nodes.each if not node.is_avoided), self._nodes.each[0]).server

    def place_of(self, key: str) -> None:
        return None

    def journal(self, prefix: str, *, size: int) -> RedisJournal:
        return RedisJournal(prefix, size, self._nodes.first, self._nodes.read)

    def close(self) -> None:
        self._nodes.close()

    def _try(self, request: LockRequest) -> Lease | Record | Votes:
        """Ask once; nothing is left of it unless it gives a lease.

        A request that was given up may arrive when the next one is under way: neither it nor its undoing may touch what
        the next one has got. So each has an owner of its own, unless no node can have granted the one before.
        """
        if request.waiting:
            self.mailbox.enrol(request)

        def enough(answers: Answers) -> float | None:
            votes = Votes(answers, self._nodes, "")
            if votes.has_majority or votes.record is not None:
                return 0.0
            # A moment longer if it is held: if all nodes refuse it, nothing is left to undo.
            return FARTHER if votes.is_held else None

        call = lock_commands.vote(request, memory=self._memory)
        request.late = True
        answers = self._nodes.ask(call, enough, seconds=_patience(request.ttl))
        votes = Votes(answers, self._nodes, request.holder.message)
        if votes.has_majority and votes.record is None:
            fence = self._fence(request, votes.granted)
            if fence and trust.came_in_time(answers.sent_at, request.ttl):
                request.late = False
                return request.lease(fence=fence, sent_at=answers.sent_at)
        if first := votes.new.count(ms(request.ttl) / 1000):  # Nobody was told before.
            logger.warning(
                "%s: %d of %d nodes are new, or came back without their data; they vote in %g s",
                *(self.server, first, len(self._nodes.each), request.ttl),
            )
        if request.another is not None:
            maybe = [node.index for node in self._nodes.each if _may_hold(answers.get(node.index))]
            request.late = bool(maybe)
            abandon = lock_commands.abandon(request.hold(), wakes=False)
            self._nodes.send(abandon, maybe, repeat_for=max(request.ttl, REPEAT_FOR))
        return votes.record or votes

    def _fence(self, wanted: LockRequest, fences: Sequence[int]) -> int | None:
        """A token that any later majority counts beyond; None if that could not be ensured."""
        fence, quorum = max(fences), self._quorum
        if fences.count(fence) >= quorum:
            return fence
        call = lock_commands.raise_fence(wanted.key, wanted.owner, fence=fence)
        enough = self._nodes.decided_by(lambda answer: answer == 1)
        answers = self._nodes.ask(call, enough, seconds=_patience(wanted.ttl))
        return fence if [*answers.values()].count(1) >= quorum else None

    def _heal(
        self, parts: Sequence[Sequence[Hold]], each: Sequence[Answers], renewed: Mapping[Hold, bool], *, seconds: float
    ) -> None:
        """Give each node the holds that it lacks and a majority has, for the next time, with the holders that others
        know.

        Without its holder, a copy of its message would take it for another task's, and be refused.
        """
        lost: defaultdict[int, list[Hold]] = defaultdict(list)
        for part, answers in zip(parts, each, strict=True):
            for index, answer in answers.items():
                lost[index] += _lost(part, answer, renewed)
        lacking = [*batches([*dict.fromkeys(hold for of_node in lost.values() for hold in of_node)])]

        def enough(place: int, answers: Answers) -> float | None:
            return at_once(len(_with_holders(lacking[place], answers)) == len(lacking[place]))

        calls = [lock_commands.values(part) for part in lacking]
        asked = self._ask(calls, enough, step=min(seconds, MAX_ANSWER)) if calls else []
        values: dict[Hold, bytes] = {}
        for part, answers in zip(lacking, asked, strict=True):
            values.update(_with_holders(part, answers))
        for index, of_node in lost.items():
            for batch in batches(of_node):
                self._nodes.send(lock_commands.put_back(batch, values), [index])

    def _wanted(self, request: LockRequest) -> Lease | Held | Record:
        return self.acquire(request)

    def _ask(self, calls: Sequence[Call], enough: Enough, *, step: float | None = None) -> list[Answers]:
        return self._nodes.ask_each(calls, enough, seconds=step or MAX_ANSWER, connect=step)

    def _majority(self, call: Call, *, of: str = "") -> list[Any]:
        each: list[Answers] = []
        for _ in tries():
            each = self._ask([call], self._is_answered)
            if len(each[0].given) >= self._quorum:
                return each[0].given
        raise self._unanswered(each)

    def _read(self, reading: Callable[[Server], T], key: str = "") -> list[T]:
        return self._nodes.read(reading, at_least=self._quorum)

    def _unanswered(self, each: Sequence[Answers]) -> LockUnavailable:
        return self._nodes.unavailable({index: words for it in each for index, words in it.errors.items()})

    def _batches(self, items: Sequence[Item], key_of: Callable[[Item], str]) -> Iterator[Sequence[Item]]:
        return batches(items)

    def _freed(self, hold: Hold, call: Call, *, repeats: bool) -> Answers:
        """The nodes' answers to freeing; if it `repeats`, it is sent again to nodes that have not answered."""

        def enough(answers: Answers) -> float | None:
            ours, gone = _freed_on(answers)
            return at_once(ours >= self._quorum or gone > self._spare)

        was_ending, hold.ending = hold.ending, True  # If this is interrupted.
        repeat_for = max(hold.ttl, REPEAT_FOR) if repeats else 0.0
        answers = self._nodes.ask(call, enough, seconds=_patience(hold.ttl), repeat_for=repeat_for)
        if _freed_on(answers)[0] >= self._quorum:
            # Not sooner: a waiter that wakes while most nodes still hold the lock would find it held.
            self._push(answers.given)
        hold.ending = was_ending
        return answers

    def _refuse(self, key: str, holder: Holder, record: Record, sent: list[Record]) -> Held | Record | None:
        """Refuse the message, on a majority of nodes that have promised that before.

        `sent` has the promise, and the record if that was sent: a copy may have recorded the same, which must stay.
        """
        answers = Answers()
        for _ in tries():
            if not sent:
                sent.append(lock_commands.promise_of(record, PROMISED))
            promise = sent[0]
            answers = self._agreed(lock_commands.refuse(key, holder, promise))
            if _agreeing(answers) >= self._quorum:
                sent += [] if record in sent else [record]
                call = lock_commands.refuse(key, holder, record, promise=promise)
                answers = self._agreed(call, repeat_for=PROMISED)
                if _agreeing(answers) >= self._quorum:
                    return None
            was_recorded, against = record in sent, len(answers.given) - _agreeing(answers)
            if was_recorded and against <= self._spare:
                # Silence is not an objection: a majority may have the record, with a node that is late, and others have
                # seen it; or what is there is another copy's refusal, which looks the same.
                continue
            # What nobody has answered in time, too: the next call of this message would find the promise.
            self._take_back(key, sent, answers)
            if len(answers.given) < self._quorum:
                continue
            found = [lock_answers.parse_refusal(it, record.message) for it in answers.given if not _says_nothing(it)]
            objections = [it for it in found if it is not None and not _is_promise(it)]
            if objections:
                return next((it for it in objections if isinstance(it, Record)), objections[0])
            if was_recorded:
                break  # It is always the same: what takes it back may arrive after it is sent again.
        raise self._nodes.unavailable(answers.errors)

    def _agreed(self, call: Call, *, repeat_for: float = 0.0) -> Answers:
        """The nodes' answers to one step of a refusal."""
        # Not merely until a majority has answered: if a node where the message's copy has the lock answers sooner than
        # one that has promised, a refusal that others have already seen would be taken back.
        enough = self._nodes.decided_by(lambda answer: _kind(answer) == Answer.GRANTED)
        return self._nodes.ask(call, enough, seconds=MAX_ANSWER, repeat_for=repeat_for)

    def _take_back(self, key: str, sent: list[Record], answers: Answers) -> None:
        """Forget what was sent. What is promised next has another name: this may arrive after it, on its own way."""
        promise, *recorded = sent
        self._nodes.send(lock_commands.take_back(key, promise), repeat_for=PROMISED)
        # Not where a node objects, as most do: it does not have the record, and may get the same one from a copy.
        maybe = [node.index for node in self._nodes.each if not _objects(answers.get(node.index))]
        for record in recorded:
            self._nodes.send(lock_commands.take_back(key, record), maybe, repeat_for=PROMISED)
        sent.clear()


def _lost(batch: Sequence[Hold], answer: Any, renewed: Mapping[Hold, bool]) -> list[Hold]:
    """The holds that a node lacks, by its answer, and a majority has."""
    if not isinstance(answer, list):
        return []
    each = zip(batch, lock_commands.renewed(batch, answer), strict=True)
    return [hold for hold, ours in each if not ours and renewed.get(hold)]


def _with_holders(holds: Sequence[Hold], answers: Answers) -> dict[Hold, bytes]:
    """What the nodes keep for these holds, as far as one of them knows the holder."""
    each = [pair for values in answers.given for pair in zip(holds, values, strict=True)]
    return {hold: value for hold, value in each if _is_with_holder(value, hold.owner.encode())}


def _is_with_holder(value: bytes, owner: bytes) -> bool:
    return value != owner and value.startswith(owner)


def _kind(answer: Any) -> Any:
    """What an answer to a vote or a refusal begins with; None for an error."""
    return None if isinstance(answer, Exception) else answer[0]


def _freed_on(answers: Answers) -> tuple[int, int]:
    """On how many nodes the lock was held, and on how many it was not."""
    gone = answers.given.count(NOT_OURS)
    return len(answers.given) - gone, gone


def _agreeing(answers: Answers) -> int:
    """How many nodes have agreed to a step of a refusal."""
    return [*map(_kind, answers.values())].count(Answer.GRANTED)


def _may_hold(answer: Any) -> bool:
    """Whether a node that answers so to a vote may have granted the lock, or may still do so."""
    is_silent = answer is None or isinstance(answer, Exception)
    return not isinstance(answer, NotAsked) and (is_silent or _kind(answer) == Answer.GRANTED)


def _objects(answer: Any) -> bool:
    """Whether the answer to a refusal is no; silence is not."""
    return answer is not None and _kind(answer) not in (None, Answer.GRANTED)


def _says_nothing(answer: Any) -> bool:
    """Whether a refusal was not even tried."""
    return bool(_kind(answer) == Answer.GIVEN_UP)


def _is_promise(found: Held | Record) -> bool:
    return isinstance(found, Record) and found.content.startswith(PROMISE)


def _patience(ttl: float) -> float:
    return min(max(ttl * trust.ANSWER_SHARE, trust.MIN_ANSWER), MAX_ANSWER)
