"""The nodes of a Redlock, asked all at once by the thread that wants to know.

A thread talks to them over one line to each: a connection on which the node answers in order. It sends the same call
on all lines, and reads until the answers are enough. What a node answers later is read, and ignored, before the answer
to something newer. A call that must be carried out (the end of a hold, or of an attempt) counts as sent once it was
answered, and not before: if its line breaks, it goes to the node's outbox.
"""

from __future__ import annotations

import logging
import math
import selectors
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import (
    ConnectionError,
    InvalidResponse,
    NoScriptError,
    RedisError,
    TimeoutError,
)

from celery_singleton_lock import clock, forks
from celery_singleton_lock.background import BackgroundJob
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.stores.redis.common import Answers, Enough
from celery_singleton_lock.stores.redis.connection import NO_ANSWER, Connection, alone, may_be_replaced, packed
from celery_singleton_lock.stores.redis.outbox import Outbox
from celery_singleton_lock.stores.redis.script import Call
from celery_singleton_lock.stores.redis.server import STEP_TIMEOUT, Server, words_of

#: Tries to get a majority, and the seconds between two of them: a random time from half of this to the whole.
TRIES, RETRY_DELAY = 3, 0.2

#: Seconds that the nodes get to answer, if no lease says less.
MAX_ANSWER = 0.5

#: Seconds that connecting to all nodes may take, if no renewal says otherwise, and that a node gets at least.
CONNECT, LEAST_CONNECT = 0.5, 0.05

#: Seconds for which a node that failed is left alone, at first and at most.
PAUSE, MAX_PAUSE = 0.5, 4.0

#: Seconds after a call for which nodes that it could not reach are tried again.
REOPEN_FOR = 60.0

#: Seconds that a request may go unanswered. A firewall may have forgotten the connection without a word: a new one
#: would work.
MUTE_FOR = STEP_TIMEOUT

#: Seconds until late answers are looked for, the first time and each next time.
LOOK_AFTER = 0.05, 0.5

#: The most seconds to wait in vain when nodes are read one after the other.
READ_ALL = 3.0

T = TypeVar("T")


class NotAsked(ConnectionError):
    """A node was not asked: there is no connection to it."""


# Nobody changes it: as for `Holder`.
@dataclass(slots=True)
class _Request:
    """A call to a node.

    Attributes:
        call: what it was.
        command: how it is sent to a node that knows the script.
        answers: where the answer goes; None if nobody waits for it.
        repeated_until: until when it is repeated if it is not answered; 0 if it may be lost.
        sent_at: when it was sent.
    """

    call: Call
    command: bytes
    answers: Answers | None
    repeated_until: float
    sent_at: float


class Node:
    """One server of a Redlock, as the threads of a process share it.

    Args:
        server: where it is.
        index: its place among the nodes.

    Attributes:
        reason: why there is no line; a text, since an exception would keep alive all that its traceback refers to.
    """

    def __init__(self, server: Server, index: int) -> None:
        self.server, self.index = server, index
        self.reason = "not connected yet"
        # The others are enough, however long it is away: nobody need be told.
        self._outbox = Outbox(server, level=logging.DEBUG)
        self._pause, self._avoided_until = PAUSE, 0.0

    @property
    def is_avoided(self) -> bool:
        return clock.now() < self._avoided_until

    @property
    def has_failed(self) -> bool:
        """Whether it failed when it was last connected to."""
        return self._pause > PAUSE

    def failed(self, error: Exception) -> None:
        """Open no line for a while, twice as long each time."""
        self.reason = words_of(error)
        self._avoided_until = clock.now() + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE)

    def open(self, step: float) -> Line | None:
        """A new line, if it can be connected to; each step takes at most so many seconds."""
        try:
            line = Line(self, self.server.open(step))
        except (RedisError, OSError) as error:
            self.failed(error)
            return None
        self._pause, self._avoided_until = PAUSE, 0.0
        return line

    def is_still_away(self) -> bool:
        """Whether it is still away; it is connected to if it was left alone for long enough."""
        if self.has_failed and not self.is_avoided and (line := self.open(CONNECT / 2)) is not None:
            line.break_off(ConnectionError("it was only looked for"))
        return self.has_failed

    def repeat(self, call: Call, seconds: float) -> None:
        """Send a call until it is answered, for that many seconds at most."""
        if seconds > 0:
            self._outbox.put(id(call), call, seconds)

    def note(self, request: _Request, answer: Any) -> None:
        """Take note of the answer to a request, or of why there is none."""
        if isinstance(answer, Exception):
            self.repeat(request.call, request.repeated_until - clock.now())
        if request.answers is not None:
            request.answers.setdefault(self.index, answer)


class Line:
    """A connection to a node, and what it has not answered there."""

    def __init__(self, node: Node, connection: Connection) -> None:
        self.node = node
        self.is_open = True
        self.events = selectors.EVENT_READ
        self._connection = connection
        self._fd = connection.fileno()
        self.unanswered: deque[_Request] = deque()
        connection.wait_at_most(0.0)

    def fileno(self) -> int:
        return self._fd

    def send(self, request: _Request) -> None:
        """Send a call behind what was sent before.

        A script goes as text when it is first used: the answer that the node does not know it may come when nobody
        reads any more.
        """
        # Before it is sent: an interruption may come between any two lines.
        self.unanswered.append(request)
        sha, known = request.call.script.sha, self._connection.ran
        self._connection.push(request.command if sha in known else packed(request.call.by_text))
        known.add(sha)
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes."""
        try:
            self._connection.flush()
        except TimeoutError:
            return
        except RedisError as error:
            self.break_off(error)

    @property
    def is_behind(self) -> bool:
        """Whether the socket has not taken all."""
        return self._connection.unsent > 0

    @property
    def is_mute(self) -> bool:
        """Whether it has not answered for long, when all that has arrived is heard."""
        return len(self.unanswered) > 0 and clock.now() - self.unanswered[0].sent_at > MUTE_FOR

    def hear(self) -> None:
        """Take note of the answers that are there; once it is closed, of none."""
        try:
            for answer in self._connection.arrived():
                self._heard(answer)
        except (RedisError, OSError) as error:
            self.break_off(error)

    def break_off(self, error: Exception) -> None:
        """Close it; what was asked will not be answered here any more."""
        if self.is_open:
            self.is_open = False
            self.node.reason = words_of(error)
            self._connection.close()
        while self.unanswered:
            self.node.note(self.unanswered.popleft(), alone(error))

    def _heard(self, answer: Any) -> None:
        if not self.unanswered:
            raise ConnectionError("it sent an answer that nobody asked for")
        request = self.unanswered.popleft()
        if isinstance(answer, NoScriptError):
            # It has forgotten all scripts. Even if nobody waits for the answer any more: this may end a hold.
            self._connection.ran.clear()
            self.send(request)
            return
        try:
            self.node.note(request, request.call.understood(answer))
        except InvalidResponse as error:
            self.node.note(request, error)
            raise
        if may_be_replaced(answer):
            self.give_up(answer)  # The next connection may find the server that has taken its place.

    def give_up(self, error: Exception) -> None:
        """Break off, and leave the node alone for a while."""
        self.node.failed(error)
        self.break_off(error)


class _Talk:
    """A line to each node that can be reached. Used by one thread at a time; after an exception, to be closed."""

    def __init__(self) -> None:
        #: By the node's index.
        self.lines: dict[int, Line] = {}
        self.used_at = 0.0
        self._selector = selectors.DefaultSelector()

    @property
    def has_backlog(self) -> bool:
        """Whether a node has not answered something that must be carried out."""
        return any(request.repeated_until for line in self.lines.values() for request in line.unanswered)

    def add(self, line: Line) -> None:
        self.lines[line.node.index] = line
        self._selector.register(line, line.events)

    def send(self, node: Node, request: _Request) -> None:
        """Send a call to a node, behind what it was sent before."""
        if (line := self.lines.get(node.index)) is None:
            node.note(request, NotAsked(node.reason))
        else:
            line.send(request)
            self._follow(line)

    def hear(self, seconds: float) -> None:
        """Wait for something to arrive, and take note of it."""
        for key, events in self._selector.select(seconds):
            line: Any = key.fileobj
            if events & selectors.EVENT_WRITE:
                line.flush()
            if events & selectors.EVENT_READ:
                line.hear()
            self._follow(line)

    def collect(self) -> None:
        """Take note of what has arrived meanwhile, and of lines that are gone, or useless."""
        self.hear(0.0)
        for line in [line for line in self.lines.values() if line.is_mute]:
            line.give_up(TimeoutError("it has not answered for long"))
            self._follow(line)

    def close(self) -> None:
        """Close all lines. An interruption may have come between any two of theirs, so they cannot be used again."""
        for line in self.lines.values():
            line.break_off(ConnectionError("the connection was given up"))
        self._selector.close()

    def _follow(self, line: Line) -> None:
        """Wait for what the line can do next."""
        if not line.is_open:
            self._selector.unregister(line)
            del self.lines[line.node.index]
        elif line.is_behind != (line.events != selectors.EVENT_READ):
            line.events ^= selectors.EVENT_WRITE
            self._selector.modify(line, line.events)


class Nodes:
    """The nodes of one store.

    Args:
        servers: an odd number of them.
        name: the name of them all, for messages.

    Attributes:
        each: the nodes.
        quorum: how many are a majority.
        spare: how many may say something else without changing what a majority says.
    """

    def __init__(self, servers: Sequence[Server], name: str) -> None:
        self.each = [Node(server, index) for index, server in enumerate(servers)]
        self.quorum = len(servers) // 2 + 1
        self.spare = len(servers) - self.quorum
        self._name = name
        self._job = BackgroundJob("singleton-lock-nodes", self._look, after=LOOK_AFTER[0])
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        #: Those that nobody uses, the last one used at the end.
        self._talks: deque[_Talk] = deque()
        #: Until when nodes that have failed are tried again.
        self._reopen_until = 0.0

    def ask(
        self, call: Call, enough: Callable[[Answers], float | None], *, seconds: float, repeat_for: float = 0.0
    ) -> Answers:
        """Send a call to each node, and collect the answers until they are enough, or for that many seconds.

        Args:
            call: what to ask.
            enough: see `Enough`.
            seconds: how long to wait for answers.
            repeat_for: seconds for which it is sent again to each node that has not answered it, also if this is
                interrupted: what only some nodes have done is not done.
        """
        try:
            (answers,) = self.ask_each([call], lambda _, it: enough(it), seconds=seconds, repeat_for=repeat_for)
        except BaseException:
            if repeat_for:  # Maybe before it was sent.
                self.repeat(call, repeat_for)
            raise
        return answers

    def ask_each(
        self,
        calls: Sequence[Call],
        enough: Enough,
        *,
        seconds: float,
        connect: float | None = None,
        repeat_for: float = 0.0,
    ) -> list[Answers]:
        """As `ask`, for several calls at once, with one time for all of them; the answers to each.

        Args:
            connect: seconds for connecting to the nodes.
        """
        with self._talk() as talk:
            self._connect(talk, connect or CONNECT)
            now = clock.now()
            until = now + seconds
            each = [Answers(sent_at=now) for _ in calls]
            for call, answers in zip(calls, each, strict=True):
                self._send(talk, self.each, call, answers, repeat_for)
            undecided, longer = set(range(len(calls))), 0.0
            while sum(map(len, each)) < len(self.each) * len(calls):
                for place in [*undecided]:
                    more = 0.0 if self.has_failed(each[place]) else enough(place, each[place])
                    if more is not None:
                        undecided.discard(place)
                        longer = max(longer, more)
                        if not undecided:
                            until = min(until, clock.now() + longer)
                if (left := until - clock.now()) <= 0:
                    break
                talk.hear(left)
            # As they are now: nobody waits for a later answer.
            return [Answers(answers, sent_at=now) for answers in each]

    def send(self, call: Call, indexes: Collection[int] | None = None, *, repeat_for: float = 0.0) -> None:
        """Send a call to some nodes, or to all, and wait for nothing.

        Args:
            call: what to do.
            indexes: the nodes'.
            repeat_for: seconds for which it is sent again to those that do not answer; 0 if it may be lost.
        """
        nodes = self.each if indexes is None else [self.each[index] for index in indexes]
        with self._talk() as talk:
            self._send(talk, nodes, call, None, repeat_for)

    def repeat(self, call: Call, seconds: float) -> None:
        """Send a call to all nodes, as far as is known for the first time, until they answer."""
        for node in self.each:
            node.repeat(call, seconds)

    def first(self, use: Callable[[Server], T]) -> T:
        """What `use` gives for the first node that answers.

        Raises:
            LockUnavailable: none does.
        """
        return self.read(use, most=1)[0]

    def read(self, reading: Callable[[Server], T], *, at_least: int = 1, most: float = math.inf) -> list[T]:
        """What each node that answers shows, one after the other; nodes that failed a moment ago come last.

        Raises:
            LockUnavailable: fewer than `at_least` answer.
        """
        found: list[T] = []
        errors: dict[int, str] = {}
        spent = 0.0
        for node in sorted(self.each, key=lambda node: node.is_avoided):
            if len(found) >= most or (node.is_avoided and len(found) >= at_least):
                break  # The others say enough.
            began = clock.now()
            try:
                found.append(reading(node.server))
            except (RedisError, OSError) as error:
                if isinstance(error, NO_ANSWER):
                    node.failed(error)
                errors[node.index] = words_of(error)
                spent += clock.now() - began
            if spent > READ_ALL or len(errors) > len(self.each) - at_least:
                break
        if len(found) < at_least:
            raise self.unavailable(errors)
        return found

    def decided_by(self, is_yes: Callable[[Any], bool]) -> Callable[[Answers], float | None]:
        """Answers are enough once a majority has said yes, or cannot any more."""

        def enough(answers: Answers) -> float | None:
            yes = sum(map(is_yes, answers.values()))
            return at_once(yes >= self.quorum or len(answers) - yes > self.spare)

        return enough

    def has_failed(self, answers: Answers) -> bool:
        """Whether too many nodes have failed for the others to be a majority."""
        return len(answers) - len(answers.given) > self.spare

    def unavailable(self, errors: Mapping[int, str]) -> LockUnavailable:
        """The error that says what was wrong with which node; a node without an error was too late, or answered."""
        failed = "; ".join(f"{self.each[index].server}: {error}" for index, error in sorted(errors.items()))
        return LockUnavailable(
            self._name, f"no majority: {self.quorum} of {len(self.each)} nodes are needed; {failed or 'no answer'}"
        )

    def close(self) -> None:
        """Close what is not in use. The outboxes go on sending."""
        self._reopen_until = 0.0
        while (talk := self._unused()) is not None:
            talk.close()
        for node in self.each:
            node.server.close()

    @contextmanager
    def _talk(self) -> Iterator[_Talk]:
        talk = self._unused() or _Talk()
        try:
            yield talk
            has_backlog, talk.used_at = talk.has_backlog, clock.now()  # Inside the `try` as well.
        except BaseException:
            talk.close()
            raise
        self._talks.append(talk)
        if has_backlog:
            self._job.schedule()

    def _unused(self) -> _Talk | None:
        """The last one that reaches a majority, if there is one.

        On a slow network, new lines may take longer than there is time, and then the nodes are left alone for a while.
        """
        with suppress(IndexError):  # None is left, or another thread has taken it.
            for _ in range(len(self._talks)):
                if len(self._talks[-1].lines) >= self.quorum:
                    break
                self._talks.rotate(1)
            return self._talks.pop()
        return None

    def _connect(self, talk: _Talk, seconds: float) -> None:
        """Open the lines that are missing, as far as that works in that time; one node gets half of it.

        Nodes that have failed come last, and only as long as there is no majority: one that hangs would hold up the
        caller. The job finds out when they are back.
        """
        talk.collect()
        until = clock.now() + seconds
        missing = [node for node in self.each if node.index not in talk.lines]
        for node in sorted(missing, key=lambda node: (node.is_avoided, node.has_failed)):
            if node.has_failed and len(talk.lines) >= self.quorum:
                continue
            line = node.open(min(seconds / 2, max(until - clock.now(), LEAST_CONNECT)))
            if line is not None:
                talk.add(line)
        if len(talk.lines) < len(self.each):
            self._reopen_until = clock.now() + REOPEN_FOR
            self._job.schedule()

    def _send(self, talk: _Talk, nodes: Sequence[Node], call: Call, answers: Answers | None, repeat_for: float) -> None:
        now = clock.now()
        request = _Request(call, packed(call.by_digest), answers, now + repeat_for if repeat_for else 0.0, now)
        for node in nodes:
            talk.send(node, request)

    def _look(self) -> float | None:
        """Take note of late answers, and of nodes that are back; None, or the seconds until the next look if something
        must still be answered, or a node that was asked lately is still away.
        """
        away = [node for node in self.each if node.is_still_away()] if clock.now() < self._reopen_until else []
        has_backlog = False
        for _ in range(len(self._talks)):
            with suppress(IndexError):  # Other threads take some meanwhile.
                if clock.now() - self._talks[0].used_at < LOOK_AFTER[1]:
                    return LOOK_AFTER[1]  # It may be needed at once.
                talk = self._talks.popleft()
                talk.collect()
                has_backlog |= talk.has_backlog
                self._talks.append(talk)
        return LOOK_AFTER[1] if has_backlog or away else None


def at_once(is_enough: bool) -> float | None:
    """What `enough` says (see `Nodes.ask`) if no further answers are wanted."""
    return 0.0 if is_enough else None


def tries(*, within: float = math.inf) -> Iterator[int]:
    """Numbers the tries to get a majority, with a pause between two; none is begun after that many seconds."""
    until = clock.now() + within
    for number in range(TRIES):
        if number:
            if clock.now() > until:
                return
            clock.sleep(clock.spread(RETRY_DELAY))
        yield number
