"""How a process learns on Redis that one of its runs is to stop: a separate connection blocks on the process's list."""

from __future__ import annotations

import json
from contextlib import ExitStack, suppress

from redis.exceptions import RedisError

from celery_singleton_lock import cleaned, forks
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import is_owner
from celery_singleton_lock.stores.redis import keyspace
from celery_singleton_lock.stores.redis.cluster import Cluster
from celery_singleton_lock.stores.redis.connection import Connection
from celery_singleton_lock.stores.redis.script import Call, Script, ms
from celery_singleton_lock.stores.redis.server import Server, words_of
from celery_singleton_lock.stores.stops import StopOrder

#: In one step, so that no list is ever without a time to live.
TELL = Script("lock/tell")

#: Seconds that one call waits: a connection that was cut without a word is noticed then.
SLICE = 10

#: Seconds for which stops are kept for a process that does not listen at this moment, and how many of them.
KEPT_FOR, KEPT = 10.0, 1000


class RedisStops:
    """`StopReader` of one process.

    Args:
        servers: where the locks are.
        server: the name of that place, for messages.
        key: the list's key.
    """

    def __init__(self, servers: Server | Cluster, server: str, key: str) -> None:
        self._servers = servers
        self._server = server
        self._key = key
        self._exits = ExitStack()
        self._connection: Connection | None = None
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        """In the child of a fork: leave the connection to the parent; nobody would listen here."""
        self._connection, self._exits = None, ExitStack()

    def wait(self) -> StopOrder | None:
        try:
            if self._connection is None:
                self._connection = self._exits.enter_context(self._servers.server_of(self._key).connection())
            self._connection.wait_at_most(SLICE + self._servers.step)
            answer = self._connection.ask(("BLPOP", self._key, SLICE))
        except (RedisError, OSError) as error:
            self._drop(error)
            raise LockUnavailable(self._server, words_of(error)) from error
        return None if answer is None else _stop(answer)

    def close(self) -> None:
        self._connection = None
        with suppress(RedisError, OSError):
            self._exits.close()

    def _drop(self, error: Exception) -> None:
        self._connection = None
        with suppress(RedisError, OSError):
            self._exits.__exit__(type(error), error, error.__traceback__)


def tell(servers: Server | Cluster, prefix: str, process: str, stop: StopOrder) -> None:
    """Notify a process.

    Raises:
        RedisError, OSError: the process may not learn of it.
    """
    servers.run(Call(TELL, [keyspace.stops_key(prefix, process)], [json.dumps(stop), KEPT, ms(KEPT_FOR)]))


def _stop(answer: object) -> StopOrder | None:
    """What was read from the list; None if somebody else has written it."""
    if not isinstance(answer, list) or len(answer) != 2 or not isinstance(answer[1], bytes):
        return None
    fields = cleaned.array(answer[1])
    if fields is None or len(fields) < 2 or not is_owner(fields[0]):
        return None
    return StopOrder(fields[0], cleaned.text(fields[1]))
