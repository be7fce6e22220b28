"""A conversation with all nodes of a Redlock at once: one thread's connections, and the answers that come in time.

Each node has one ordered connection here. An answer that comes too late is read, and ignored, before the answer to
something newer; what is sent behind a request that the node has not answered yet cannot overtake it.

A call that is to be repeated (the end of a hold, or of an attempt) counts as sent once it was answered, and not before:
a connection that breaks, or is given up, leaves it to the next one.
"""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from redis.exceptions import (
    ConnectionError,
    InvalidResponse,
    NoScriptError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from celery_singleton_lock import clock
from celery_singleton_lock.stores.redis import ledger
from celery_singleton_lock.stores.redis.connection import Connection, alone, may_be_replaced, packed
from celery_singleton_lock.stores.redis.redlock import commands
from celery_singleton_lock.stores.redis.redlock.node import Node
from celery_singleton_lock.stores.redis.script import Call
from celery_singleton_lock.stores.redis.server import STEP_TIMEOUT

#: Rounds without an answer after which a node counts as silent: it is sent what is pending, and asked for nothing.
SILENT = 32

#: Unanswered requests, seconds that one of them has waited, and bytes that its socket has not taken, at which the
#: connection is given up. A firewall may have forgotten it without a word: a new one would work.
MUTE, MUTE_FOR, MAX_UNSENT = 1000, STEP_TIMEOUT, 8_000_000

#: The least seconds for a step of connecting to a node, whatever is left of the time for all.
_LEAST = 0.02

#: Seconds after which a conversation counts as unused.
_UNUSED = 0.5

#: The answers so far, by the node's index; an exception if it failed.
Answers = Mapping[int, Any]


class NotAsked(ConnectionError):
    """A node was not asked: there is no connection to it, or it has been silent for long."""


# Nobody changes a call once it is sent, as for `Holder`.
@dataclass(slots=True)
class _Request:
    """A call to a node.

    Attributes:
        call: what it was.
        number: the round in which it was sent.
        answers: where the answer goes, as long as somebody waits for it; None if nobody does.
        settled: the nodes that have answered it, whether or not somebody waits; None if nobody wants to know.
        until: until when it is to be repeated if it is not answered, by `clock.now()`; 0 if it is not repeated.
        sent_at: when it was first sent.
    """

    call: Call
    number: int
    answers: dict[int, Any] | None
    until: float
    settled: set[int] | None = None
    sent_at: float = field(default_factory=clock.now)


class Conversation:
    """A connection to each node. Used by one thread at a time; after an exception, to be closed.

    Args:
        nodes: the nodes to ask.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._connections: list[Connection | None] = [None] * len(nodes)
        self._unanswered: list[deque[_Request]] = [deque() for _ in nodes]
        #: The number of the last round.
        self._round = 0
        self._unused_since = 0.0
        self._selector = selectors.DefaultSelector()
        #: The events of each connection that the selector waits for.
        self._waits_for = [0] * len(nodes)

    def connect(self, *, step: float, seconds: float) -> None:
        """Open the missing connections, as far as that works, and send the nodes what is pending.

        Args:
            step: seconds that each step of connecting to a node may take.
            seconds: for all nodes. Those that failed before come last. Those that failed a moment ago are left out as
                long as the others are a majority.
        """
        until = clock.now() + seconds
        self.collect()
        missing = [index for index, connection in enumerate(self._connections) if connection is None]
        others = [index for index in missing if not self._nodes[index].is_avoided]
        if len(others) + self.reaches > len(self._nodes) // 2:
            missing = others
        missing.sort(key=lambda index: self._nodes[index].has_failed)
        for place, index in enumerate(missing):
            # Each has its share of the time, and what those before it have left.
            share = max((until - clock.now()) / (len(missing) - place), _LEAST)
            try:
                self._open(index, min(step, share))
            except (RedisError, OSError) as error:
                self._nodes[index].failed(error)
        for index, node in enumerate(self._nodes):
            if node.owes and self._connections[index] is not None:
                for repeated_until, call in node.take_pending():
                    self._send(index, _Request(call, self._round, None, repeated_until))

    def ask(
        self,
        call: Call,
        enough: Callable[[Answers], bool],
        *,
        seconds: float,
        repeat_for: float = 0.0,
        settled: set[int] | None = None,
        linger: Callable[[Answers], float] = lambda _: 0.0,
    ) -> dict[int, Any]:
        """Send a call to each node, and collect the answers until they are enough, or for that many seconds.

        Args:
            call: what to ask.
            enough: whether the answers so far decide the matter.
            seconds: how long to wait for answers.
            repeat_for: seconds for which it is sent again to each node that has not answered it.
            settled: each node that has answered is added to this, also when nobody waits for it any more.
            linger: for how many seconds it collects further answers after they were enough.
        """
        (answers,) = self.ask_each(
            [call],
            lambda each: enough(each[0]),
            seconds=seconds,
            repeat_for=repeat_for,
            settled=settled,
            linger=lambda each: linger(each[0]),
        )
        return answers

    def ask_each(
        self,
        calls: Sequence[Call],
        enough: Callable[[Sequence[Answers]], bool],
        *,
        seconds: float,
        repeat_for: float = 0.0,
        settled: set[int] | None = None,
        linger: Callable[[Sequence[Answers]], float] = lambda _: 0.0,
    ) -> list[dict[int, Any]]:
        """As `ask`, for several calls at once, with one time for all of them; the answers to each."""
        self._round += 1
        each: list[dict[int, Any]] = [{} for _ in calls]
        until = clock.now() + seconds
        repeated_until = clock.now() + repeat_for if repeat_for else 0.0
        for call, answers in zip(calls, each, strict=True):
            command, request = packed(call.by_digest), _Request(call, self._round, answers, repeated_until, settled)
            for index in range(len(self._nodes)):
                is_silent = self._is_silent(index)
                if is_silent:
                    answers[index] = NotAsked("it has not answered for some time")
                if not is_silent or repeated_until:
                    self._send(index, request, command)
        asked, is_decided = len(self._nodes) * len(calls), False
        while sum(map(len, each)) < asked:
            if not is_decided and enough(each):
                is_decided, until = True, min(until, clock.now() + linger(each))
            if (left := until - clock.now()) <= 0:
                break
            self._hear(left)
        # As they are now: nobody waits for a later answer.
        return [dict(answers) for answers in each]

    def send(self, call: Call, indexes: Collection[int], *, repeat_for: float = 0.0) -> None:
        """Send a call to some nodes, behind what they have not answered yet, and wait for nothing.

        Args:
            call: what to do.
            indexes: the nodes'.
            repeat_for: seconds for which it is sent again to those that do not answer; 0 if it may be lost.
        """
        command = packed(call.by_digest)
        until = clock.now() + repeat_for if repeat_for else 0.0
        for index in indexes:
            self._send(index, _Request(call, self._round, None, until), command)

    def collect(self) -> None:
        """Take note of what has arrived meanwhile, and of connections that are gone, or useless."""
        while self._hear(0.0):
            pass
        for index, unanswered in enumerate(self._unanswered):
            if unanswered and clock.now() - unanswered[0].sent_at > MUTE_FOR:
                self._break_off(index, TimeoutError("it has not answered for long"))

    def put_away(self) -> bool:
        """Put it aside for now; whether a node `is_behind`."""
        if any(request.until for unanswered in self._unanswered for request in unanswered):
            self.collect()  # What else has arrived meanwhile can wait until it is used again.
        self._unused_since = clock.now()
        return self.is_behind

    @property
    def reaches(self) -> int:
        """To how many nodes there is a connection, as far as is known."""
        return sum(connection is not None for connection in self._connections)

    @property
    def is_unused(self) -> bool:
        return clock.now() - self._unused_since > _UNUSED

    @property
    def is_behind(self) -> bool:
        """Whether a node has not answered a call that is to be repeated. Even if only that answer is under way: if the
        connection breaks, nobody else would notice.
        """
        now = clock.now()
        return any(request.until > now for unanswered in self._unanswered for request in unanswered)

    def close(self) -> None:
        """Close all connections; what is pending is left to others."""
        for index in range(len(self._nodes)):
            self._break_off(index, ConnectionError("the connection was given up"))
        self._selector.close()

    def _is_silent(self, index: int) -> bool:
        unanswered = self._unanswered[index]
        return len(unanswered) > 0 and self._round - unanswered[0].number > SILENT

    def _open(self, index: int, step: float) -> None:
        node = self._nodes[index]
        connection = node.server.open(step)
        connection.wait_at_most(0.0)
        self._connections[index] = connection
        self._selector.register(connection, selectors.EVENT_READ, index)
        self._waits_for[index] = selectors.EVENT_READ
        node.connected()
        self._load(index)

    def _load(self, index: int) -> None:
        """Load all scripts. Not when first used: the answer that one is unknown may come when nobody waits for it any
        more, as that to the end of a hold, which the node would keep then.
        """
        for script in (*commands.SCRIPTS, *ledger.SCRIPTS):
            loading = _Request(Call(script, (), ()), self._round, None, 0.0)
            self._send(index, loading, packed(script.load))

    def _send(self, index: int, request: _Request, command: bytes | None = None) -> None:
        """Send a call to a node, behind what it was sent before, or have it repeated."""
        if len(self._unanswered[index]) >= MUTE:
            self._break_off(index, TimeoutError("it has not answered for long"))
        connection = self._connections[index]
        if connection is None:
            self._note(index, request, NotAsked(self._nodes[index].reason))
            return
        # Before it is sent: an interruption may come between any two lines.
        self._unanswered[index].append(request)
        connection.push(command or packed(request.call.by_digest))
        self._flush(index)

    def _hear(self, seconds: float) -> bool:
        """Wait for something to arrive, and take note of it; whether something has."""
        ready = self._selector.select(seconds)
        for key, events in ready:
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)
            if events & selectors.EVENT_READ:
                self._read(key.data)
        return any(events & selectors.EVENT_READ for _, events in ready)

    def _flush(self, index: int) -> None:
        if (connection := self._connections[index]) is None:
            return
        try:
            connection.flush()
            if connection.unsent > MAX_UNSENT:
                raise TimeoutError("it has not taken what was sent for some time")
        except RedisError as error:
            self._break_off(index, error)
            return
        # Wait for what the socket can do next.
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._waits_for[index] != events:
            self._selector.modify(connection, events, index)
            self._waits_for[index] = events

    def _read(self, index: int) -> None:
        if (connection := self._connections[index]) is None:
            return
        try:
            for answer in connection.arrived():
                if not self._unanswered[index]:
                    raise ConnectionError("it sent an answer that nobody asked for")
                request = self._unanswered[index].popleft()
                if isinstance(answer, NoScriptError):
                    # Even if nobody waits for it any more: it may end a hold.
                    self._send(index, request, packed(request.call.by_text))
                    if all(it.call.keys for it in self._unanswered[index]):
                        self._load(index)  # It has forgotten the others, too.
                    if self._connections[index] is None:
                        return
                else:
                    self._note(index, request, self._understood(index, request, answer))
                if may_be_replaced(answer):
                    # The next connection may find the server that has taken its place.
                    self._nodes[index].failed(answer)
                    raise ConnectionError("it may no longer be the master")
        except (RedisError, OSError) as error:
            self._break_off(index, error)

    def _understood(self, index: int, request: _Request, answer: Any) -> Any:
        if not request.call.keys:
            return answer  # The script was only loaded.
        try:
            return request.call.understood(answer)
        except InvalidResponse as error:
            self._note(index, request, error)
            raise

    def _note(self, index: int, request: _Request, answer: Any) -> None:
        """Take note of a node's answer, or of why there is none."""
        if request.until:
            self._nodes[index].note(request.call, request.until, answer)
        if request.answers is not None:
            request.answers.setdefault(index, answer)
        if request.settled is not None and (not isinstance(answer, Exception) or isinstance(answer, ResponseError)):
            request.settled.add(index)

    def _break_off(self, index: int, error: Exception) -> None:
        """Give up a connection; what the node was asked will not be answered any more."""
        connection, unanswered = self._connections[index], list(self._unanswered[index])
        if connection is not None:
            self._connections[index] = None
            self._unanswered[index].clear()
            with suppress(KeyError, ValueError):
                self._selector.unregister(connection)
            if unanswered:
                connection.drop()
            else:
                connection.close()
        error = alone(error)
        for request in unanswered:
            self._note(index, request, error)
