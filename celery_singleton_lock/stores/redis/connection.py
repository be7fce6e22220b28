"""One connection to a Redis server, on which commands are answered in the order in which they were sent.

redis-py's connection dials and logs in (TLS, user, database, unix socket, Sentinel's master), and hiredis packs and
parses. In between are a few lines of our own, the same for one server, on which a thread waits, and for the nodes of a
Redlock, which one thread asks at once. Commands can be sent behind others that were not answered yet.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - or the first look-up of a host does it, maybe in a thread while another forks
import re
import selectors
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import hiredis
from redis.connection import Connection as RedisPyConnection
from redis.connection import DefaultParser
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    InvalidResponse,
    MasterDownError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from celery_singleton_lock.stores.redis._redis_py import socket_of
from celery_singleton_lock.stores.redis.script import Call, Command

#: Errors in place of an answer: the server may carry the command out, or have done so.
NO_ANSWER = (ConnectionError, TimeoutError, OSError)

#: No answer in time; it can still be read.
Late = TimeoutError

Failure = TypeVar("Failure", bound=Exception)

_NOTHING = object()

#: Takes no descriptor of its own, as there may be many connections; not there on Windows, or in a pool of eventlet.
_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)

_READ = 65_536

#: Linger for no time: closing resets the connection.
_AT_ONCE = struct.pack("ii", 1, 0)

_WITHIN_SCRIPT = re.compile(r"^ERR Error running script .*: -([A-Z]+ .*)", re.DOTALL)


class Parser(DefaultParser):  # type: ignore[misc,valid-type]
    """Knows the errors of a cluster, as redis-py's parser does since version 6, and tells an error of a command in a
    script (Redis 6) as the command's own.
    """

    EXCEPTION_CLASSES = {  # noqa: RUF012 - as in redis-py
        **cast("Any", DefaultParser).EXCEPTION_CLASSES,
        "ASK": AskError,
        "CLUSTERDOWN": ClusterDownError,
        "MOVED": MovedError,
        "TRYAGAIN": TryAgainError,
    }

    @classmethod
    def parse_error(cls, response: str) -> Exception:
        within = _WITHIN_SCRIPT.search(response)
        text = within.group(1) if within else response
        try:
            error: Exception = super().parse_error(text)
        except ValueError:  # MOVED, without saying where to.
            error = ResponseError(text)
        return error


def packed(command: Command) -> bytes:
    """A command as it goes over the wire.

    hiredis (3.5) crashes the process if a signal handler raises while it formats a number, so it gets no numbers.
    """
    parts: Any = tuple([part if type(part) in (str, bytes) else str(part) for part in command])
    packed: bytes = hiredis.pack_command(parts)
    return packed


#: How such errors begin for which redis-py has no class: older ones know MASTERDOWN in a cluster only.
_REPLACED = "MASTERDOWN", "NOREPLICAS"


def may_be_replaced(error: object) -> bool:
    """Whether a server's error says that another one may be the master by now, which only a new connection would find:
    this one is a replica, or has lost its replicas.
    """
    if not isinstance(error, ResponseError):
        return False
    return isinstance(error, (ReadOnlyError, MasterDownError)) or str(error).startswith(_REPLACED)


def alone(error: Failure) -> Failure:
    """The error, which takes the place of an answer, without the frames that refer to it; see `unless_error`."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def unless_error(answer: Any, kind: type[Exception] = Exception) -> Any:
    """The answer, or raise it if it is an error of this kind.

    An error refers to the frames that it has passed, and so to the leases of its callers: the heartbeat renews what
    somebody refers to. So none of these frames may refer to the error, which would keep both until the garbage is
    collected.
    """
    if isinstance(answer, kind):
        try:
            raise answer
        finally:
            del answer
    return answer


class Connection:
    """A connection to one server. Used by one thread at a time.

    Args:
        undialed: redis-py's connection, not connected yet.

    Raises:
        RedisError, OSError: no connection, or the login was refused.
    """

    def __init__(self, undialed: RedisPyConnection) -> None:
        try:
            undialed.connect()  # type: ignore[no-untyped-call]
        except (RedisError, OSError):
            raise
        except Exception as error:  # Of a program's own credential provider, say.
            raise ConnectionError(f"{type(error).__name__} while connecting: {error}") from error
        self._dialed = undialed
        self._socket = socket_of(undialed)
        # Closing it, as redis-py does after some errors, resets it. Otherwise the kernel would go on trying, and
        # what was given up would come minutes later.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        #: Seconds that a step may take.
        self.step: float | None = undialed.socket_timeout
        #: Commands that were sent and not answered yet.
        self.unanswered = 0
        #: Digests of scripts that were run here by their text, as their user has noted.
        self.ran: set[str] = set()
        #: Whether an answer did not fit what was asked, or has shown that another server may be the master by now.
        self.is_doubtful = False
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse, replyError=Parser.parse_error, notEnoughData=_NOTHING
        )
        self._selector = _Selector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        #: Pushed bytes that the socket has not taken yet.
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def push(self, *commands: bytes) -> None:
        """Have packed commands sent by `flush`."""
        for command in commands:
            # Before it is sent: an interruption may come between any two lines, and the next user must not take the
            # answer to this for an answer to something else.
            self.unanswered += 1
            self._unsent += command

    def flush(self) -> None:
        """Send what was pushed.

        Raises:
            TimeoutError: the socket does not take all of it yet.
            ConnectionError: it will not.
        """
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except OSError as error:
            raise _as_redis_py_says(error, "sending") from error

    def answers(self, commands: Sequence[Command]) -> list[Any]:
        """The answers to some commands, in one round trip; an error takes the place of an answer.

        Raises:
            TimeoutError, ConnectionError: not all were sent, or answered; the connection must not be used again.
        """
        self.push(*map(packed, commands))
        self.flush()
        return [self._next() for _ in commands]

    def run_each(self, calls: Sequence[Call]) -> list[Any]:
        """Run some scripts, in one round trip: by their digests, and again by its text each that the server does not
        know yet; an error takes the place of an answer.

        Raises:
            ReadOnlyError: this server may no longer be the master, so another connection is to carry them all out.
        """
        answers = self.answers([call.by_digest for call in calls])
        for place, call in enumerate(calls):
            if isinstance(answers[place], NoScriptError):
                answers[place : place + 1] = self.answers([call.by_text])
        if self.is_doubtful:
            raise ReadOnlyError(str(next(filter(may_be_replaced, answers))))
        for place, call in enumerate(calls):
            try:
                call.understood(answers[place])
            except InvalidResponse as error:
                self.is_doubtful, answers[place] = True, alone(error)
        return answers

    def wait_at_most(self, seconds: float) -> None:
        """How long a step of sending or reading may take from now on; 0: it does not wait."""
        self.step = seconds
        self._socket.settimeout(seconds)

    @property
    def is_quiet(self) -> bool:
        """Whether it is still open, and nothing has come to read."""
        return not (self._reader.has_data() or self._selector.select(0))

    @property
    def unsent(self) -> int:
        """Bytes that were pushed, and that the socket has not taken."""
        return len(self._unsent)

    def arrived(self) -> Iterator[Any]:
        """The answers that are there, errors among them, if no step waits.

        Raises:
            ConnectionError: after the last of them.
        """
        received = False
        while True:
            while (answer := self._reader.gets()) is not _NOTHING:
                self.unanswered -= 1
                yield answer
            if received and not self.unanswered:
                return
            try:
                # Even if nothing is to come: the server may have closed the connection.
                self.receive()
            except TimeoutError:
                return
            received = True

    def receive(self) -> None:
        """Wait for some bytes of the next answer."""
        try:
            received = self._socket.recv(_READ)
        except OSError as error:
            raise _as_redis_py_says(error, "reading") from error
        if not received:
            raise ConnectionError("the server closed the connection")
        self._reader.feed(received)

    def close(self) -> None:
        """End it, whatever is still under way; in the child of a fork, only here."""
        self._dialed.disconnect()  # type: ignore[no-untyped-call]

    def _next(self) -> Any:
        """The next answer, or the error of a command in its place.

        Raises:
            ConnectionError: the server is about to end, or was just started: nothing is known of the others.
        """
        while (answer := self._reader.gets()) is _NOTHING:
            self.receive()
        self.unanswered -= 1
        if not isinstance(answer, Exception):
            return answer
        self.is_doubtful |= may_be_replaced(answer)
        try:
            return unless_error(answer, ConnectionError)
        finally:
            del answer


def _as_redis_py_says(error: OSError, doing: str) -> Exception:
    # A non-blocking socket raises BlockingIOError, a TLS socket an SSLWant...Error.
    if isinstance(error, (socket.timeout, BlockingIOError)) or type(error).__name__.startswith("SSLWant"):
        return TimeoutError(f"timeout while {doing}")
    return ConnectionError(f"{type(error).__name__} while {doing}: {error}")
