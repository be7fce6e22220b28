"""Connections of this process to one Redis server (or to whatever Sentinel says is the master)."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from redis.backoff import NoBackoff
from redis.connection import Connection as RedisPyConnection
from redis.connection import ConnectionPool
from redis.exceptions import (
    AskError,
    ClusterCrossSlotError,
    ClusterDownError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from celery_singleton_lock import cleaned, forks
from celery_singleton_lock.errors import FOREIGN
from celery_singleton_lock.stores.redis._redis_py import OF_A_POOL
from celery_singleton_lock.stores.redis.connection import Connection, Parser, may_be_replaced, unless_error
from celery_singleton_lock.stores.redis.script import Call, Command

T = TypeVar("T")

#: Seconds that one step (connect, send, read) may take, unless the connection options say less.
STEP_TIMEOUT = 1.0

#: What our parsing and our own retries depend on, whatever the URL or the client says.
_FIXED_OPTIONS: Mapping[str, Any] = {
    "protocol": 2,
    "parser_class": Parser,
    "decode_responses": False,
    "health_check_interval": 0,
    "retry_on_error": [],
}


#: Of a node of a cluster that is taken for a single server: what is wrong, and what to do.
OF_A_CLUSTER = "it is a node of a cluster, which has a part of the keys"
NAME_THE_CLUSTER = (
    "write redis+cluster:// (with TLS rediss+cluster://) in singleton_lock_backend, without the number of a database; "
    "a Lock takes a redis.cluster.RedisCluster"
)

#: MOVED (which is an AskError in redis-py), ASK, CROSSSLOT, CLUSTERDOWN and TRYAGAIN.
_OF_A_CLUSTER = (AskError, ClusterCrossSlotError, ClusterDownError, TryAgainError)


def words_of(error: BaseException) -> str:
    """An error's text, without the internals at the end of an error about Sentinels: some versions show a password.

    A server that does not know AUTH (renamed, or a proxy) repeats its arguments: these are left out, too.
    """
    text = f"{type(error).__name__}: {error}".partition(" : <")[0].partition(", with args beginning with")[0]
    if "WRONGTYPE" in text and "script" in text:  # The server names the line of the script, and not the key.
        return f"a key of this lock is {FOREIGN}, of another type; `celery locks doctor` finds it (WRONGTYPE)"
    return cleaned.text(text)


def is_of_a_cluster(error: BaseException) -> bool:
    """Whether an answer to somebody who takes the server for a single one shows that it is a node of a cluster."""
    return isinstance(error, _OF_A_CLUSTER) or "not allowed in cluster mode" in str(error)


def _options_of(pool: ConnectionPool) -> Mapping[str, Any]:
    """The options of our connections to where a pool connects to."""
    given = {name: value for name, value in list(pool.connection_kwargs.items()) if name not in OF_A_POOL}
    return {**given, **_FIXED_OPTIONS}


class Server:
    """One server, as redis-py's `pool` would connect to it; the connections are our own.

    Each is used by one thread at a time and opened when needed. Nothing is ever sent twice from here.

    Args:
        pool: where to connect to and how to log in; it is not used for anything else.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = weakref.ref(pool)  # The connections of a client's locks go with the client.
        self._class: type[RedisPyConnection] = pool.connection_class
        self._options = _options_of(pool)
        self.step = min(STEP_TIMEOUT, self._options.get("socket_timeout") or STEP_TIMEOUT)
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        """Without connections, in the child of a fork: those are the parent's. They are dropped and not closed, which
        would shut down the parent's TLS.
        """
        self._free: deque[Connection] = deque()

    def __str__(self) -> str:
        at = self._options
        return str(at.get("path") or f"{at.get('host', 'localhost')}:{at.get('port', 6379)}/{at.get('db') or 0}")

    def run(self, call: Call, *, step: float | None = None) -> Any:
        """Run a script; one round trip.

        Raises:
            RedisError, OSError: no answer, or an error.
        """
        return unless_error(self.run_each([call], step=step)[0])

    def run_each(self, calls: Sequence[Call], *, step: float | None = None) -> list[Any]:
        """Run several scripts in one round trip. See `Connection.run_each`."""
        return self.use(partial(Connection.run_each, calls=calls), step=step)

    @property
    def is_of_a_cluster(self) -> bool:
        """Whether it is a node of a cluster, as far as it says: any user may ask for that."""
        try:
            answer = self.command("HELLO")
        except (RedisError, OSError) as error:
            return is_of_a_cluster(error)
        return isinstance(answer, list) and (b"mode", b"cluster") in zip(answer[::2], answer[1::2], strict=False)

    def server_of(self, key: str) -> Server:
        """The server that has the key: this one."""
        return self

    def slot_of(self, key: str) -> int:
        """Keys with the same slot can be named in one call: all of them."""
        return 0

    def place_of(self, key: str) -> None:
        """Where the key is: all are in one place."""

    def servers(self) -> Sequence[Server]:
        """All servers with keys."""
        return [self]

    def command(self, *command: object) -> Any:
        """The answer to a command."""
        return unless_error(self.command_each([command])[0])

    def command_each(self, commands: Sequence[Command]) -> list[Any]:
        return self.use(partial(Connection.answers, commands=commands))

    def use(self, converse: Callable[[Connection], T], *, step: float | None = None) -> T:
        """What a conversation gives, on a connection for this thread, which is kept unless the conversation broke off.

        Raises:
            RedisError, OSError: no connection, or what the conversation raises.
        """
        connection = self.take(step or self.step)
        try:
            found = converse(connection)
        except BaseException as error:
            self.give_back(connection, error)
            raise
        self.give_back(connection, None)
        return found

    def open(self, step: float | None = None) -> Connection:
        """A new connection, for the caller to keep and to close; each of its steps takes at most `step` seconds, and at
        most `self.step`: a server that hangs must not hold up those that answer.
        """
        step = min(step or self.step, self.step)
        connect = min(step, self._options.get("socket_connect_timeout") or STEP_TIMEOUT)
        return Connection(self.undialed(socket_timeout=step, socket_connect_timeout=connect))

    def undialed(self, **options: Any) -> RedisPyConnection:
        """A connection of redis-py that retries nothing, not connected yet."""
        if (pool := self._pool()) is not None:  # They may have been changed in place: another password, say.
            self._options = _options_of(pool)
        return self._class(**{**self._options, **options, "retry": Retry(NoBackoff(), 0)})

    def close(self) -> None:
        """Close the connections that nobody uses."""
        with suppress(IndexError):  # Other threads take some meanwhile.
            while True:
                self._free.pop().close()

    def take(self, step: float) -> Connection:
        while self._free:
            try:
                connection = self._free.pop()
            except IndexError:  # Another thread took it.
                break
            if connection.is_quiet:
                if connection.step != step:
                    connection.wait_at_most(step)
                return connection
            connection.close()
        return self.open(step)

    def give_back(self, connection: Connection, error: BaseException | None) -> None:
        is_answer = error is None or (isinstance(error, ResponseError) and not may_be_replaced(error))
        if is_answer and not (connection.unanswered or connection.is_doubtful):
            self._free.append(connection)
            return
        # Half a conversation, whose answer must not be read as that to the next command, ends here. Or a failover is
        # under way (its replicas may have left it), and the next connection may find the new master.
        connection.close()
        # So are those that nobody uses, if this was a restart, a failover, or a firewall that forgets connections: one
        # after the other, they would use up all tries of a call. Not if this was interrupted.
        if connection.is_doubtful or isinstance(error, (RedisError, OSError)):
            self.close()
