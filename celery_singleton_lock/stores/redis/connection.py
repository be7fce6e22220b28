"""One connection to a Redis server, on which commands are answered in the order in which they were sent.

redis-py's connection dials and logs in (TLS, user, database, unix socket, Sentinel's master), sends and reads; its
client's pool and retries are not used. Commands can be sent behind others that were not answered yet.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - or the first look-up of a host does it, maybe in a thread while another forks
import re
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
    """The error, which takes the place of an answer, without the frames that refer to it; see `Connection.read`."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


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
        #: Seconds that a step may take; None if that is not known.
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
        #: Pushed bytes that the socket has not taken yet.
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, *commands: Command) -> None:
        """Send some commands at once; `read` gives the answer to each, after the answers to earlier commands."""
        wire = b"".join(map(packed, commands))
        # Before it is sent: an interruption may come between any two lines, and the next user must not take the answer
        # to this for an answer to something else.
        self.unanswered += len(commands)
        self._dialed.send_packed_command([wire], check_health=False)  # type: ignore[no-untyped-call]

    def read(self) -> Any:
        """The next answer.

        Raises:
            ResponseError: it is an error.
            TimeoutError: it is not there yet; it can be read later.
            ConnectionError: it will not come; the connection must not be used again.
        """
        try:
            answer = self._dialed.read_response(disconnect_on_error=False)
        except ResponseError as error:
            self.unanswered -= 1
            # Frames that refer to it, as redis-py's do before version 6, and so to the leases of its callers, must not
            # live on in a cycle: the heartbeat renews what somebody refers to.
            raise error.with_traceback(None) from None
        self.unanswered -= 1
        return answer

    def ask(self, command: Command) -> Any:
        """The answer to a command."""
        self.send(command)
        return self.read()

    def answers(self, commands: Sequence[Command]) -> list[Any]:
        """The answers to some commands, in one round trip; an error takes the place of an answer."""
        self.send(*commands)
        answers = [self._answer() for _ in commands]
        self.is_doubtful |= any(map(may_be_replaced, answers))
        return answers

    def run(self, call: Call) -> Any:
        """Run a script by its digest, or by its text if the server does not know it yet."""
        try:
            return call.understood(self.ask(call.by_digest))
        except NoScriptError:
            return call.understood(self.ask(call.by_text))

    def run_each(self, calls: Sequence[Call]) -> list[Any]:
        """As `run`, for several calls in one round trip; if one fails, its error takes the place of its answer.

        Raises:
            ReadOnlyError: this server may no longer be the master, so another connection is to carry them all out.
        """
        answers = self.answers([call.by_digest for call in calls])
        if unknown := [place for place, answer in enumerate(answers) if isinstance(answer, NoScriptError)]:
            known = self.answers([calls[place].by_text for place in unknown])
            for place, answer in zip(unknown, known, strict=True):
                answers[place] = answer
        for place, call in enumerate(calls):
            if may_be_replaced(answers[place]):
                raise ReadOnlyError(str(answers[place]))
            try:
                call.understood(answers[place])
            except InvalidResponse as error:
                self.is_doubtful, answers[place] = True, alone(error)
        return answers

    def _answer(self) -> Any:
        try:
            return self.read()
        except ResponseError as error:
            return alone(error)

    def wait_at_most(self, seconds: float) -> None:
        """How long a step of sending or reading may take from now on; 0: no step of `flush` or `arrived` waits."""
        if seconds != self.step:
            self.step = seconds
            self._socket.settimeout(seconds)

    @property
    def is_quiet(self) -> bool:
        """Whether it is still open, and nothing has come to read."""
        if self.step != self._dialed.socket_timeout:
            self.step = None  # redis-py before version 8 sets it back to the other one.
        try:
            return not self._dialed.can_read()
        except (RedisError, OSError):
            return False

    def close(self) -> None:
        """End it, whatever is still under way; in the child of a fork, only here."""
        self._dialed.disconnect()  # type: ignore[no-untyped-call]

    # For a Redlock, whose nodes one thread asks at once: redis-py has nothing that does not wait.

    def push(self, command: bytes) -> None:
        """Have a command sent by `flush`, in non-blocking mode."""
        self.unanswered += 1
        self._unsent += command

    def flush(self) -> None:
        """Send as much of what was pushed as the socket takes."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except OSError as error:
                said = _as_redis_py_says(error, "sending")
                if isinstance(said, TimeoutError):
                    return
                raise said from error
            del self._unsent[:sent]

    @property
    def unsent(self) -> int:
        return len(self._unsent)

    def arrived(self) -> Iterator[Any]:
        """The answers that are there, errors among them, without waiting for more; in non-blocking mode.

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
                self._reader.feed(self.received())
            except TimeoutError:
                return
            received = True

    def received(self) -> bytes:
        try:
            received = self._socket.recv(_READ)
        except OSError as error:
            raise _as_redis_py_says(error, "reading") from error
        if not received:
            raise ConnectionError("the server closed the connection")
        return received


def _as_redis_py_says(error: OSError, doing: str) -> Exception:
    # A non-blocking socket raises BlockingIOError, a TLS socket an SSLWant...Error.
    if isinstance(error, (socket.timeout, BlockingIOError)) or type(error).__name__.startswith("SSLWant"):
        return TimeoutError(f"timeout while {doing}")
    return ConnectionError(f"{type(error).__name__} while {doing}: {error}")
