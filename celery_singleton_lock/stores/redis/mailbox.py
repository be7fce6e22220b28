"""The mailbox of a process on Redis: a list on which one connection blocks, whatever the number of its waiters.

Who frees a lock pushes the name of a waiter, which may be on another server of a cluster than the lock: so no script
can do it. On a Redlock it is pushed on all nodes, and read on one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery.utils.log import get_logger
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from celery_singleton_lock import clock
from celery_singleton_lock.background import BackgroundJob
from celery_singleton_lock.stores.redis import keyspace
from celery_singleton_lock.stores.redis.connection import Connection, unless_error
from celery_singleton_lock.stores.redis.server import Server, words_of
from celery_singleton_lock.stores.waiters import Mailbox

logger = get_logger(__name__)

#: Seconds for which a connection blocks at once.
BLOCKS = 2.0

#: Seconds until the next try after an error: at first, and at most.
PAUSE, MAX_PAUSE = 0.01, 2.0


class RedisMailbox(Mailbox):
    """A `Mailbox` on a server, or on one of a cluster or of a Redlock.

    Args:
        server_of: the server that has a key; asked again after an error.
        server: the name of that place, for messages.
    """

    def __init__(self, server_of: Callable[[str], Server], server: str) -> None:
        super().__init__()
        self._server_of = server_of
        self._server = server
        self._failures = 0
        #: Whether this user may not block there: then its waiters ask by themselves.
        self._polls = False
        self._job = BackgroundJob("singleton-lock-mailbox", self._listen)

    def start_anew(self) -> None:
        super().start_anew()
        self._key = ""

    def member(self, key: str, name: str) -> str:
        self._key = self._key or key + keyspace.MAIL + self.name
        return f"{self._key}|{name}"

    def expect(self, key: str, name: str, hear: Callable[[], object]) -> None:
        self.member(key, name)  # Before anybody listens: the mailbox has its key now.
        super().expect(key, name, hear)
        if not self._polls:
            self._job.schedule()

    def _listen(self) -> float | None:
        """Wait for the next wake-up; None if nobody waits."""
        if not self._waiters or self._polls:
            return None
        try:
            server = self._server_of(self._key)

            def wait(connection: Connection) -> list[Any]:
                connection.wait_at_most(BLOCKS + server.step)
                return connection.answers([("BLPOP", self._key, BLOCKS)])

            found = unless_error(server.use(wait)[0])
        except (RedisError, OSError) as error:
            return self._pause(error)
        self._failures = 0
        if isinstance(found, list) and isinstance(found[-1], bytes):
            self.deliver(found[-1].decode(errors="replace"))
        return 0.0

    def _pause(self, error: RedisError | OSError) -> float | None:
        is_unknown = isinstance(error, ResponseError) and "unknown command" in str(error)
        if is_unknown or isinstance(error, NoPermissionError):
            self._polls = True
            logger.warning(
                "%s: no process can be woken there, so those that wait for a lock ask every second: %s",
                *(self._server, words_of(error)),
            )
            return None
        logger.debug("%s: nobody is woken for now: %s", self._server, words_of(error))
        self._failures += 1
        return clock.back_off(self._failures, PAUSE, MAX_PAUSE)
