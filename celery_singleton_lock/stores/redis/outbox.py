"""Calls that a server has not answered, repeated until it does: the ends of locks, of questions, and of messages.

Nobody waits for them any more, so they may be carried out late, and more than once.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

from celery.utils.log import get_logger
from redis.exceptions import ClusterDownError, ReadOnlyError, RedisError, TryAgainError

from celery_singleton_lock.batches import BATCH, Batches, Waiting
from celery_singleton_lock.stores.redis.cluster import Cluster
from celery_singleton_lock.stores.redis.connection import NO_ANSWER, unless_error
from celery_singleton_lock.stores.redis.script import Call, batches
from celery_singleton_lock.stores.redis.server import Server, words_of

logger = get_logger(__name__)

#: Seconds until the first repetition.
AFTER = 0.05

#: Errors after which another server may answer the next question, and not know what is pending. Others, such as a lack
#: of memory, meet that question as well.
_ELSEWHERE = (*NO_ANSWER, ClusterDownError, ReadOnlyError, TryAgainError)

#: Identifies a call: what it ends, the key of the lock, and the owner.
CallId = tuple[str, str, str]


class Outbox(Batches[Call]):
    """The calls that `servers` have not answered, by their `CallId`.

    Without their answer, a lock ends with its lease; a message whose end is not noted may be carried out again, should
    another copy of it come.
    """

    def __init__(self, servers: Server | Cluster, *, level: int = logging.WARNING) -> None:
        self._servers = servers
        super().__init__("releases and ends of messages", after=AFTER, level=level)

    def send_those_of(self, key: str) -> None:
        """Send those of a lock again, now: what is asked next comes after them, so that a copy of a message that has
        ended in this process finds that out, whatever it asks.

        Raises:
            RedisError, OSError: no answer, or an error after which another server may answer what is asked next.
        """
        if not self._waiting:
            return
        for batch in batches([it for it in self.in_time() if it.name[1] == key], BATCH):
            unless_error(self._sent(batch))

    def send(self, items: Sequence[Call]) -> Sequence[bool]:
        try:
            return [not isinstance(answer, Exception) for answer in self._answers(items)]
        except (RedisError, OSError) as error:
            logger.debug("releases or ends of messages are pending: %s", words_of(error))
            return [False] * len(items)

    def place_of(self, item: Call) -> Hashable:
        return self._servers.place_of(item.keys[0])

    def _sent(self, batch: Sequence[Waiting[Call]]) -> Exception | None:
        """Send these; an error after which another server may answer what is asked next."""
        answers = self._answers([it.item for it in batch])
        self.forget(batch, [not isinstance(answer, Exception) for answer in answers])
        return next((answer for answer in answers if isinstance(answer, _ELSEWHERE)), None)

    def _answers(self, calls: Sequence[Call]) -> list[Any]:
        answers = self._servers.run_each([call.again() for call in calls])
        for answer in answers:
            if isinstance(answer, Exception):
                logger.debug("a release or the end of a message is pending: %s", words_of(answer))
        return answers
