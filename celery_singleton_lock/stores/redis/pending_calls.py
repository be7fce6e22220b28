"""Calls that a server has not answered, repeated until it does: the ends of locks, of questions, and of messages.

Nobody waits for them any more, so they may be carried out late, and more than once. In the child of a fork nothing is
pending: the parent repeats its calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from celery.utils.log import get_logger
from redis.exceptions import ClusterDownError, TryAgainError

from celery_singleton_lock import clock, forks
from celery_singleton_lock.stores.redis.connection import NO_ANSWER, may_be_replaced
from celery_singleton_lock.stores.redis.repeater import Repeater
from celery_singleton_lock.stores.redis.script import Call, batches

logger = get_logger(__name__)

#: The most calls; the oldest are dropped. A lock that was not freed ends with its lease; a message whose end is not
#: noted may be carried out again, should another copy of it come.
MOST = 10_000

#: Calls in one round trip.
BATCH = 50

#: Errors after which another server may answer the next question, and not know what is pending. Others, such as a lack
#: of memory, meet that question as well.
_ELSEWHERE = (*NO_ANSWER, ClusterDownError, TryAgainError)

#: Identifies a call: what it ends, the key of the lock, and the owner.
CallId = tuple[str, str, str]


class _Pending(NamedTuple):
    """A call that was not answered, and until when it is worth repeating."""

    call: Call
    until: float


class PendingCalls:
    """The pending calls of one store.

    Args:
        run_each: sends some calls, and gives the answers; an exception for a call that failed.
        server: its name, for messages.
    """

    def __init__(self, run_each: Callable[[Sequence[Call]], Sequence[Any]], server: str) -> None:
        self._run_each = run_each
        self._server = server
        self._mutex: AbstractContextManager[bool]
        self._calls: dict[CallId, _Pending]
        self._repeater: Repeater
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        """Start without any: at first, and in the child of a fork."""
        self._mutex = threading.RLock()  # A signal's handler that frees a lock may have interrupted `add`.
        self._calls = {}
        self._repeater = Repeater(self._repeat)

    def __bool__(self) -> bool:
        """Whether there are any: the server did not answer a moment ago."""
        return bool(self._calls)

    def ids(self) -> list[CallId]:
        """The ids of those that are not answered yet, including those that are under way."""
        with self._mutex:
            return list(self._calls)

    def add(self, call_id: CallId, call: Call, *, seconds: float) -> None:
        """Repeat it until it is answered, for that many seconds; it replaces what was added under this id."""
        with self._mutex:
            self._calls.pop(call_id, None)
            if len(self._calls) >= MOST:
                self._calls.pop(next(iter(self._calls)))
                logger.warning(
                    "%s: more than %d releases and ends of messages were not answered; the oldest are given up",
                    self._server,
                    MOST,
                )
            self._calls[call_id] = _Pending(call, clock.now() + seconds)
        self._repeater.start()

    def send(self, key: str) -> None:
        """Send those of a lock again, now: what is asked next comes after them.

        Raises:
            RedisError, OSError: no answer, or an error after which another server may answer what is asked next.
        """
        for batch in batches([it for it in self._due() if it[0][1] == key], BATCH):
            for answer in self._send(batch):
                if isinstance(answer, _ELSEWHERE) or may_be_replaced(answer):
                    try:
                        raise answer
                    finally:
                        del answer  # It refers to this frame from now on; see `Connection.read`.

    def _repeat(self) -> bool:
        """Send them again; whether some are left."""
        for batch in batches(self._due(), BATCH):
            try:
                self._send(batch)
            except Exception as error:  # noqa: BLE001 - whatever it was, it is tried again
                logger.debug("%s: releases or ends of messages are pending: %s", self._server, error)
                break  # The rest would not be answered either. In a cluster some masters may answer.
        return bool(self._calls)

    def _send(self, batch: Sequence[tuple[CallId, _Pending]]) -> Sequence[Any]:
        """The answers; what was answered is no longer pending."""
        answers = self._run_each([it.call.again() for _, it in batch])
        with self._mutex:
            for (call_id, it), answer in zip(batch, answers, strict=True):
                if isinstance(answer, Exception):
                    logger.debug("%s: a release or the end of a message is pending: %s", self._server, answer)
                elif self._calls.get(call_id) is it:
                    del self._calls[call_id]
        return answers

    def _due(self) -> list[tuple[CallId, _Pending]]:
        with self._mutex:
            now = clock.now()
            # Of a copy: a signal's handler may add one meanwhile, or find that it is too late for this one.
            for call_id, it in list(self._calls.items()):
                if now > it.until and self._calls.pop(call_id, None) is not None:
                    logger.warning(
                        "%s: a release or the end of a message was never answered, and is given up (a lock has "
                        "expired since)",
                        self._server,
                    )
            return list(self._calls.items())
