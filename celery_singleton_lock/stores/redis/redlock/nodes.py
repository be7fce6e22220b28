"""The nodes of a Redlock together: the answer of a majority, and repeated calls to nodes that did not answer."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from redis.exceptions import ConnectionError, RedisError

from celery_singleton_lock import chance, clock
from celery_singleton_lock.background import BackgroundJob
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.stores.redis.connection import NO_ANSWER
from celery_singleton_lock.stores.redis.redlock.conversation import Answers, Conversation
from celery_singleton_lock.stores.redis.redlock.node import Node
from celery_singleton_lock.stores.redis.script import Call
from celery_singleton_lock.stores.redis.server import Server, words_of

#: Tries to get a majority, and the seconds between two of them: a random time from half of this to the whole.
TRIES, RETRY_DELAY = 3, 0.2

#: Seconds that the nodes get to answer, if no lease says less.
MAX_ANSWER = 0.5

#: Seconds that one step of connecting to a node may take, and the most for connecting to all.
CONNECT, CONNECT_ALL = 0.25, 0.5

#: Seconds until what a node has not answered is repeated, the first time and each next time.
REPEAT_AFTER = 0.05, 0.5

#: The most seconds to wait in vain when nodes are read one after the other.
READ_ALL = 3.0

T = TypeVar("T")


class Nodes:
    """The nodes of one store, and this process's conversations with them.

    Args:
        servers: an odd number of them.
        name: the name of them all, for messages.

    Attributes:
        each: the nodes.
        quorum: how many are a majority.
        spare: how many may say something else without changing what a majority says.
    """

    def __init__(self, servers: Sequence[Server], name: str) -> None:
        self.each = [Node(server) for server in servers]
        self.quorum = len(servers) // 2 + 1
        self.spare = len(servers) - self.quorum
        self._name = name
        self._conversations: deque[Conversation] = deque()
        self._job = BackgroundJob("singleton-lock-nodes", self._repeat, after=REPEAT_AFTER[0])
        self._pid = os.getpid()
        self._is_closed = False

    @contextmanager
    def conversation(self, *, step: float = CONNECT, seconds: float = CONNECT_ALL) -> Iterator[Conversation]:
        """A conversation with the nodes that can be reached, for this thread; what is pending afterwards is repeated.

        Args:
            step, seconds: see `Conversation.connect`.
        """
        self._forget_if_forked()
        self._is_closed = False
        conversation = self._unused()
        try:
            conversation.connect(step=step, seconds=seconds)
            yield conversation
            # Inside the `try` as well: calls that were not answered yet would be forgotten with it.
            is_behind = conversation.put_away()
        except BaseException:
            conversation.close()
            if self._have_pending():
                self._job.schedule()
            raise
        self._conversations.append(conversation)
        if is_behind or self._have_pending():
            self._job.schedule()

    def majority(self, call: Call) -> list[Any]:
        """The answers of a majority at least.

        Raises:
            LockUnavailable: there is none.
        """
        answers: Answers = {}
        for _ in tries():
            with self.conversation() as conversation:
                is_decided = self.decided_by(lambda answer: not isinstance(answer, Exception))
                answers = conversation.ask(call, is_decided, seconds=MAX_ANSWER)
            if len(given(answers)) >= self.quorum:
                return given(answers)
        raise self.unavailable(errors_of(answers))

    def repeat(self, call: Call, seconds: float, *, but: Collection[int]) -> None:
        """Have this call repeated, for that many seconds, to each node except those that have answered."""
        for index, node in enumerate(self.each):
            if index not in but:
                node.note(call, clock.now() + seconds, ConnectionError("it was not asked, as far as is known"))
        self._job.schedule()

    def first(self, use: Callable[[Server], T]) -> T:
        """What `use` gives for the first node that answers.

        Raises:
            LockUnavailable: none does.
        """
        errors: dict[int, str] = {}
        until = clock.now() + READ_ALL
        for index, node in enumerate(self.each):
            if not node.is_avoided and clock.now() < until:
                try:
                    return use(node.server)
                except (RedisError, OSError) as error:
                    errors[index] = _failed(node, error)
        raise self.unavailable(errors)

    def read(self, reading: Callable[[Server], T], *, at_least: int = 1) -> list[T]:
        """What each node that answers shows, one after the other; nodes that failed a moment ago come last.

        Raises:
            LockUnavailable: fewer than `at_least` answer.
        """
        found: list[T] = []
        errors: dict[int, str] = {}
        spent = 0.0
        for index, node in sorted(enumerate(self.each), key=lambda pair: pair[1].is_avoided):
            if node.is_avoided and len(found) >= at_least:
                continue  # The others say enough.
            began = clock.now()
            try:
                found.append(reading(node.server))
            except (RedisError, OSError) as error:
                errors[index] = _failed(node, error)
                spent += clock.now() - began
            if spent > READ_ALL or len(errors) > len(self.each) - at_least:
                break
        if len(found) < at_least:
            raise self.unavailable(errors)
        return found

    def decided_by(self, is_yes: Callable[[Any], bool]) -> Callable[[Answers], bool]:
        """Whether a majority has said yes, or cannot any more."""

        def is_decided(answers: Answers) -> bool:
            yes = sum(map(is_yes, answers.values()))
            return yes >= self.quorum or len(answers) - yes > self.spare

        return is_decided

    def has_failed(self, answers: Answers) -> bool:
        """Whether too many nodes have failed for the others to be a majority."""
        return len(answers) - len(given(answers)) > self.spare

    def unavailable(self, errors: Mapping[int, str]) -> LockUnavailable:
        """The error that says what was wrong with which node; a node without an error was too late, or answered."""
        failed = "; ".join(f"{self.each[index].server}: {error}" for index, error in sorted(errors.items()))
        return LockUnavailable(
            self._name, f"no majority: {self.quorum} of {len(self.each)} nodes are needed; {failed or 'no answer'}"
        )

    def close(self) -> None:
        """Close the connections that are not in use; those that have something pending are closed after that."""
        self._is_closed = True
        self._forget_if_forked()
        with suppress(IndexError):  # Other threads take some meanwhile.
            while True:
                self._conversations.pop().close()
        for node in self.each:
            node.server.close()

    def _unused(self) -> Conversation:
        """The last one that has connections to a majority, if there is one: on a slow network, new ones may take longer
        than there is time, and then the nodes are left alone for a while.
        """
        try:
            for _ in range(len(self._conversations)):
                if self._conversations[-1].reaches >= self.quorum:
                    break
                self._conversations.rotate(1)
            return self._conversations.pop()
        except IndexError:
            return Conversation(self.each)

    def _forget_if_forked(self) -> None:
        if self._pid != os.getpid():
            # These sockets are the parent's, and so is what is pending there. They are not closed either: the selectors
            # are the parent's too, which would hear nothing any more.
            self._conversations, self._pid = deque(), os.getpid()

    def _have_pending(self) -> bool:
        return any(node.has_pending for node in self.each)

    def _repeat(self) -> float | None:
        """Send the nodes what is pending; None, or the seconds until the next time if something is left."""
        is_behind = self._collect()
        for node in self.each:
            # Not in a conversation, which somebody may need while this waits for a node.
            is_behind |= node.settle(CONNECT, MAX_ANSWER)
        if self._is_closed and not is_behind:
            self.close()
        return REPEAT_AFTER[1] if is_behind else None

    def _collect(self) -> bool:
        """Take note of what has arrived in unused conversations; whether a node is behind there."""
        is_behind = False
        for _ in range(len(self._conversations)):
            try:
                # Those that have not been used for long are on the left, after those without connections to a majority.
                if not self._conversations[0].is_unused:
                    return True
                conversation = self._conversations.popleft()
            except IndexError:
                break
            try:
                is_behind |= conversation.put_away()
            except BaseException:
                conversation.close()
                raise
            self._conversations.append(conversation)
        return is_behind


def tries(*, within: float = float("inf")) -> Iterator[int]:
    """Numbers the tries to get a majority, with a pause between two; none is begun after that many seconds."""
    until = clock.now() + within
    for number in range(TRIES):
        if number:
            if clock.now() > until:
                return
            clock.sleep(chance.spread(RETRY_DELAY))
        yield number


def given(answers: Answers) -> list[Any]:
    """The answers that are not errors."""
    return [answer for answer in answers.values() if not isinstance(answer, Exception)]


def errors_of(answers: Answers) -> dict[int, str]:
    """What was wrong, by the node's index."""
    return {index: words_of(answer) for index, answer in answers.items() if isinstance(answer, Exception)}


def _failed(node: Node, error: Exception) -> str:
    """The words of an error; a node that did not answer is left alone for a while."""
    if isinstance(error, NO_ANSWER):
        node.failed(error)
    return words_of(error)
