"""A model of one Redis server; see the package's docstring for its differences from a real server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.simulation.redis import (  # noqa: F401 - they make themselves known
    blocking_commands,
    collection_commands,
    connection_commands,
    generic_commands,
    script_commands,
    server_commands,
)
from tests.simulation.redis.cluster import ClusterMap
from tests.simulation.redis.dataset import Change, Dataset, copied
from tests.simulation.redis.registry import COMMANDS, Known
from tests.simulation.redis.replies import NIL_LIST, WRONG_TYPE, CallError, CommandError, UnknownCommand
from tests.simulation.redis.scripting import lua_of
from tests.simulation.redis.session import Blocked, Session

_FOREIGN = "attempted to access a non local key in a cluster node"


class RedisModel:
    """A server that does one thing at a time. It uses neither the real time nor real randomness, and never sleeps.

    Args:
        clock: the server's wall clock, in seconds since the epoch; it may jump.
        randint: returns a random number between two bounds, for the id of this run of the server.
        version: as in INFO; before 7, errors of scripts have another form.
        dataset: its initial data; it belongs to the server from now on.

    Attributes:
        dataset: all keys.
        cluster: what it knows of its cluster.
        on_write: called with the changes of a command, or of a whole script, and with their number.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        randint: Callable[[int, int], int] = lambda low, high: low,
        version: str = "7.2.4",
        dataset: Dataset | None = None,
    ) -> None:
        self._clock = clock
        self.version = tuple(int(part) for part in version.split("."))
        self.is_seven = self.version >= (7,)
        self.dataset = dataset if dataset is not None else Dataset()
        self.cluster: ClusterMap | None = None
        self.on_write: Callable[[int, Sequence[Change]], None] | None = None
        self.offset = 0
        self.run_id = f"{randint(0, 2**160 - 1):040x}"
        self.lua = lua_of(self.is_seven)
        self.scripts: dict[bytes, bytes] = {}
        self.sessions: dict[int, Session] = {}
        self.session: Session
        #: The time of the present command, in µs and in ms since the epoch.
        self.us = self.ms = 0
        self._last_id = 0
        self._changed: dict[bytes, None] = {}
        self._asking = False
        self._waiting: dict[bytes, list[Session]] = {}
        self._ready: deque[bytes] = deque()
        self._woken: deque[Session] = deque()
        self._to_flush: dict[int, Session] = {}
        self._turns = 0

    # Clients

    def connect(
        self, send: Callable[[bytes], None], *, address: str, closed: Callable[[], None] = lambda: None
    ) -> Session:
        """A client has connected.

        Args:
            send: gets what the server sends to the client.
            address: of the client, as in CLIENT LIST.
            closed: called when the server closes the connection.
        """
        self._last_id += 1
        session = Session(self, self._last_id, send, address, closed)
        self.sessions[session.id] = session
        return session

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One turn of the server's loop, in which it reads from several clients.

        Commands behind a woken BLPOP run at its end, and answers are sent then; otherwise each `receive` is a turn.
        """
        self.begin_turn()
        try:
            yield
        finally:
            self.end_turn()

    def begin_turn(self) -> None:
        """Begin a turn, see `turn`."""
        self._turns += 1

    def end_turn(self) -> None:
        """End a turn, see `turn`."""
        self._turns -= 1
        if self._turns:
            return
        while self._woken:
            self._woken.popleft().go_on()
        while self._to_flush:
            self._to_flush.pop(next(iter(self._to_flush))).flush()

    def drop(self, session: Session) -> None:
        """Close a connection from the server's side."""
        if session.id in self.sessions:
            session.flush()
            session.close()
            session.closed()

    # Time

    def next_timer(self) -> float | None:
        """When a blocked command times out, on the server's clock; None if none does."""
        ends = [each.blocked.until for each in self.sessions.values() if each.blocked and each.blocked.until]
        return min(ends) / 1000 if ends else None

    def run_timers(self) -> None:
        """End the blocked commands whose time is over."""
        with self.turn():
            now = self._tick()
            over = [each for each in self.sessions.values() if each.blocked and 0 < each.blocked.until <= now]
            for session in sorted(over, key=lambda each: (each.blocked.until, each.id)):  # type: ignore[union-attr]
                self._unblock(session, NIL_LIST)

    # Data from outside

    def move_slots(self, cluster: ClusterMap) -> None:
        """The cluster's map has changed: a client blocked on a key that is now elsewhere is sent there."""
        self.cluster = cluster
        with self.turn():
            self._tick()
            for session in [each for each in self.sessions.values() if each.blocked]:
                keys = session.blocked.keys if session.blocked else ()
                held = sum(self.lookup(key) is not None for key in keys)
                if (elsewhere := cluster.redirection(keys, held, asking=False)) is not None:
                    self._unblock(session, elsewhere)

    # For commands

    def lookup(self, key: bytes) -> Any:
        """The value of a key; None if it does not exist or has expired."""
        end = self.dataset.ends_at.get(key)
        if end is not None and self.ms > end:
            self.remove(key)
            return None
        return self.dataset.values.get(key)

    def typed(self, key: bytes, kind: type) -> Any:
        """Like `lookup`, for a value of this type."""
        value = self.lookup(key)
        if value is not None and value.__class__ is not kind:
            raise CommandError(WRONG_TYPE)
        return value

    def made(self, key: bytes, kind: type) -> Any:
        """Like `typed`, but an empty value if there is none, to be filled, and `changed`."""
        value = self.typed(key, kind)
        if value is None:
            value = self.dataset.values[key] = kind()
            self.dataset.ends_at.pop(key, None)
        return value

    def put(self, key: bytes, value: Any, ends_at: int | None) -> None:
        self.dataset.values[key] = value
        self.expire_at(key, ends_at)

    def expire_at(self, key: bytes, ends_at: int | None) -> None:
        if ends_at is None:
            self.dataset.ends_at.pop(key, None)
        else:
            self.dataset.ends_at[key] = ends_at
        self._changed[key] = None

    def remove(self, key: bytes) -> bool:
        self.dataset.ends_at.pop(key, None)
        self._changed[key] = None
        return self.dataset.values.pop(key, None) is not None

    def changed(self, key: bytes) -> None:
        """A collection has changed: an empty one is deleted, an element of a list may wake a client."""
        value = self.dataset.values[key]
        if not value and isinstance(value, (list, dict)):
            self.remove(key)
            return
        self._changed[key] = None
        if key in self._waiting and key not in self._ready:
            self._ready.append(key)

    def flush(self) -> None:
        self._changed.update(dict.fromkeys(self.dataset.values))
        self.dataset.values.clear()
        self.dataset.ends_at.clear()

    def block(self, blocked: Blocked) -> None:
        """Let the client wait for this; see `Blocked`."""
        self.session.blocked = blocked
        for key in blocked.keys:
            self._waiting.setdefault(key, []).append(self.session)

    def unwait(self, session: Session) -> None:
        """End the waiting of a client."""
        blocked, session.blocked = session.blocked, None
        for key in blocked.keys if blocked else ():
            waiting = self._waiting[key]
            waiting.remove(session)
            if not waiting:
                del self._waiting[key]

    def run_script(self, text: bytes, sha: bytes, keys: list[bytes], args: list[bytes]) -> bytes:
        """The answer of a script, as it goes over the wire."""
        return self.lua.run(self, text, sha, keys, args)

    def from_script(self, name: bytes, args: list[bytes]) -> Any:
        """Carry out a command of a script."""
        known = COMMANDS.get(name) or COMMANDS.get(name.upper())
        if known is None:
            raise UnknownCommand(f"{name!r} in a script, with {args}")
        if not known.takes(len(args) + 1):
            raise CallError(
                "ERR Wrong number of args calling Redis command from script",
                "Wrong number of args calling Redis command From Lua script",
            )
        if not known.in_scripts:
            raise CallError(
                "ERR This Redis command is not allowed from script", "This Redis command is not allowed from scripts"
            )
        if self.cluster is not None and self._redirection(known, args) is not None:
            raise CallError(f"ERR Script {_FOREIGN}", f"Lua script {_FOREIGN}")
        return known.run(self, args)

    # The loop

    def execute(self, session: Session, words: list[bytes]) -> None:
        """Carry out a command of a client."""
        name, *args = words
        known = COMMANDS.get(name) or COMMANDS.get(name.upper())
        if known is None:
            raise UnknownCommand(f"{name!r}, with {args[:8]}")
        self.session = session
        self._tick()
        self._asking, session.asking = session.asking, False
        try:
            self._check(known, args)
            reply = known.run(self, args)
        except CommandError as error:
            reply = error
        self._tell()
        if session.blocked is None:
            self.reply(session, reply)
        self._serve()

    def reply(self, session: Session, reply: Any) -> None:
        session.answer(reply)
        self._to_flush[session.id] = session

    def _check(self, known: Known, args: list[bytes]) -> None:
        """Check that the command can be carried out here and now.

        Raises:
            CommandError: it cannot.
        """
        if not known.takes(len(args) + 1):
            raise CommandError(f"ERR wrong number of arguments for '{known.name}' command")
        if self.cluster is not None and (elsewhere := self._redirection(known, args)) is not None:
            raise elsewhere

    def _redirection(self, known: Known, args: list[bytes]) -> CommandError | None:
        """The redirection of a command of a client, or of its script."""
        assert self.cluster is not None
        keys = known.keys(args)
        held = sum(self.lookup(key) is not None for key in keys)
        return self.cluster.redirection(keys, held, asking=self._asking, is_seven=self.is_seven)

    def _serve(self) -> None:
        """Give pushed elements to the clients that wait for them, longest wait first."""
        while self._ready:
            key = self._ready.popleft()
            while (waiting := self._waiting.get(key)) and self.lookup(key).__class__ is list:
                session = waiting[0]
                element = self.dataset.values[key].pop(0)
                self.changed(key)
                self._unblock(session, [key, element])
            self._tell()

    def _unblock(self, session: Session, reply: Any) -> None:
        self.unwait(session)
        self.reply(session, reply)
        self._woken.append(session)

    def _tick(self) -> int:
        self.us = int(self._clock() * 1_000_000)
        self.ms = self.us // 1000
        return self.ms

    def _tell(self) -> None:
        """Report the changes of a command."""
        if not self._changed:
            return
        keys, self._changed = self._changed, {}
        self.offset += 1
        if self.on_write is None:
            return
        values, ends_at = self.dataset.values, self.dataset.ends_at
        self.on_write(self.offset, [Change(key, copied(values.get(key)), ends_at.get(key)) for key in keys])
