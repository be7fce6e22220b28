"""Asking all nodes of a Redlock at once: one thread's connections to them, and what they answer in time.

Each node has one ordered stream here. An answer that comes too late is read, and left aside, before the answer to
something newer; what is sent behind a request that the node has not answered yet cannot overtake it.
"""

from __future__ import annotations

import selectors
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import hiredis
from redis.exceptions import ConnectionError, NoScriptError, RedisError, TimeoutError

from celery_singleton_lock import clock
from celery_singleton_lock.mutex import Mutex
from celery_singleton_lock.stores.calls import OF_A_NODE, Call
from celery_singleton_lock.stores.server import Server, told
from celery_singleton_lock.stores.stream import Stream

#: Seconds for which a node is left alone that could not be connected to: at first, and at most.
PAUSE, MAX_PAUSE = 0.5, 4.0

#: Unanswered requests with which a node counts as silent: it is told to release, and asked for nothing.
SILENT = 32

#: Unanswered requests with which the connection is given up, and calls that are kept for a node without one.
MUTE = 1000

#: Nobody waits for the answer.
_UNHEARD = 0

#: The answers so far, by the node's index; an exception where it failed.
Answers = Mapping[int, Any]


class Node:
    """One server of a Redlock, and whether it can be reached. Shared by the threads of a process."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._mutex = Mutex()
        self._pause = PAUSE
        self._rests_until = 0.0
        #: What it is to be told, and until when; the oldest give way, and end by their ttl.
        self._owed: deque[tuple[float, Call]] = deque(maxlen=MUTE)
        #: Why there is no connection; a text, since an exception would keep all alive that its traceback refers to.
        self.reason = "not connected yet"

    @property
    def is_resting(self) -> bool:
        """Whether it failed a moment ago."""
        return clock.now() < self._rests_until

    def failed(self, error: Exception) -> None:
        """Leave it alone for a while, twice as long each time."""
        with self._mutex.lock:
            self.reason = told(error)
            self._rests_until = clock.now() + self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE)

    def connected(self) -> None:
        """It is well."""
        with self._mutex.lock:
            self._pause, self._rests_until = PAUSE, 0.0

    def owe(self, call: Call, seconds: float) -> None:
        """Send the call when there is a connection again; it is pointless after so many seconds."""
        with self._mutex.lock:
            self._owed.append((clock.now() + seconds, call))

    def owed(self) -> list[Call]:
        """What is to be sent on a new connection."""
        with self._mutex.lock:
            owed = list(self._owed)
            self._owed.clear()
        return [call for until, call in owed if until > clock.now()]


class Fan:
    """A connection to each node. Used by one thread at a time; after an exception, to be closed.

    Args:
        nodes: those to ask.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = nodes
        self._streams: list[Stream | None] = [None] * len(nodes)
        #: What a node has not answered, and in which round it was asked.
        self._unanswered: list[deque[tuple[int, Call]]] = [deque() for _ in nodes]
        self._round = _UNHEARD
        self._selector = selectors.DefaultSelector()

    def connect(self, *, step: float) -> None:
        """Open what connections are missing and can be had; each step of that takes at most `step` seconds."""
        for index, node in enumerate(self._nodes):
            if self._streams[index] is None and not node.is_resting:
                try:
                    self._open(index, step)
                except (RedisError, OSError) as error:
                    node.failed(error)

    def ask(
        self, call: Call, enough: Callable[[Answers], bool], *, seconds: float, owed_for: float = 0.0
    ) -> dict[int, Any]:
        """Send a call to each node, and collect the answers until they are enough, or for so many seconds.

        Args:
            call: what to ask.
            enough: whether the answers so far decide the matter.
            seconds: how long to wait for answers.
            owed_for: a node that cannot be asked now is told later, unless that takes longer than so many seconds.
        """
        self._round += 1
        answers: dict[int, Any] = {}
        command = hiredis.pack_command(call.by_digest)
        for index in range(len(self._nodes)):
            if len(self._unanswered[index]) >= SILENT:
                answers[index] = TimeoutError("it has not answered for some time")
            else:
                self._send(index, call, command, self._round, answers)
        until = clock.now() + seconds
        while len(answers) < len(self._nodes) and not enough(answers) and (left := until - clock.now()) > 0:
            for ready, _ in self._selector.select(left):
                self._read(ready.data, answers)
        if owed_for:
            self.tell(call, [index for index, answer in answers.items() if _is_none(answer)], seconds=owed_for)
        return answers

    def tell(self, call: Call, indexes: Collection[int], *, seconds: float) -> None:
        """Send a call to some nodes, behind what they have not answered yet, and wait for nothing.

        A node without a connection is told when there is one again, unless that takes longer than `seconds`.
        """
        command = hiredis.pack_command(call.by_digest)
        for index in indexes:
            if len(self._unanswered[index]) >= MUTE:
                self._drop(index)
            self._send(index, call, command, _UNHEARD, {})
            if self._streams[index] is None:
                self._nodes[index].owe(call, seconds)

    def close(self) -> None:
        """Close all connections."""
        for index in range(len(self._nodes)):
            self._drop(index)
        self._selector.close()

    def _open(self, index: int, step: float) -> None:
        node = self._nodes[index]
        stream = node.server.open(step)
        try:
            # Not when first used: the answer that a script is unknown may come when nobody waits for it any more.
            for script in OF_A_NODE:
                stream.send(("SCRIPT", "LOAD", script.text))
            for _ in OF_A_NODE:
                stream.read()
        except BaseException:
            stream.close()
            raise
        stream.wait_at_most(0.0)
        self._streams[index] = stream
        self._selector.register(stream, selectors.EVENT_READ, index)
        node.connected()
        for owed in node.owed():
            self._send(index, owed, hiredis.pack_command(owed.by_digest), _UNHEARD, {})

    def _send(self, index: int, call: Call, command: bytes, number: int, answers: dict[int, Any]) -> None:
        stream = self._streams[index]
        if stream is None:
            answers[index] = ConnectionError(self._nodes[index].reason)
            return
        try:
            stream.send_packed(command)
        except RedisError as error:
            self._drop(index)
            answers[index] = error
        else:
            self._unanswered[index].append((number, call))

    def _read(self, index: int, answers: dict[int, Any]) -> None:
        if (stream := self._streams[index]) is None:
            return
        try:
            for answer in stream.arrived():
                number, call = self._unanswered[index].popleft()
                if isinstance(answer, NoScriptError):
                    # Also where nobody waits for it any more: it may be a release.
                    self._send(index, call, hiredis.pack_command(call.by_text), number, answers)
                    if self._streams[index] is None:
                        return
                elif number == self._round:
                    answers[index] = answer
        except (RedisError, OSError) as error:
            self._drop(index)
            answers.setdefault(index, error)

    def _drop(self, index: int) -> None:
        stream = self._streams[index]
        if stream is not None:
            self._streams[index] = None
            self._unanswered[index].clear()
            with suppress(KeyError, ValueError):
                self._selector.unregister(stream)
            stream.close()


def _is_none(answer: object) -> bool:
    """Whether it is not the node that answered."""
    return isinstance(answer, (ConnectionError, TimeoutError, OSError))
