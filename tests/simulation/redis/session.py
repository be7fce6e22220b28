"""A client's connection as the server sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import hiredis

from tests.simulation.redis.replies import UnknownCommand, encoded

if TYPE_CHECKING:
    from tests.simulation.redis.server import RedisModel


@dataclass(frozen=True, slots=True)
class Blocked:
    """What a client waits for.

    Attributes:
        until: on the server's clock in ms; 0: forever.
        keys: lists; it waits for an element in one of them.
    """

    until: int
    keys: Sequence[bytes]


_ONLY_BYTES = frozenset({bytes})

#: Bytes that Redis reads from a client in one turn (`PROTO_IOBUF_LEN`).
AT_ONCE = 16 * 1024


class Written(bytes):
    """An answer that is already encoded."""


class Session:
    """A connection.

    Attributes:
        server: at its other end.
        id, address: of the client.
        closed: see `RedisModel.connect`.
        asking: whether its next command may be about a slot that is about to move here.
        blocked: what it waits for.
        offset: up to which it has seen writes, including those of others.
    """

    def __init__(
        self, server: RedisModel, identity: int, send: Callable[[bytes], None], address: str, closed: Callable[[], None]
    ) -> None:
        self.server = server
        self.id, self.address = identity, address
        self.closed = closed
        self.asking = False
        self.blocked: Blocked | None = None
        self._send = send
        self._reader = hiredis.Reader()
        self._answers: list[bytes] = []
        self._is_open = True

    def receive(self, data: bytes) -> None:
        """Read bytes from the client, perhaps only a part of a command, as Redis does: other clients have their turn
        before the next part.
        """
        for at in range(0, len(data), AT_ONCE):
            if self._is_open:
                self.server.begin_turn()
                try:
                    self._reader.feed(data[at : at + AT_ONCE])
                    self.go_on()
                finally:
                    self.server.end_turn()

    def close(self) -> None:
        """The client is gone: commands behind a blocked command are not carried out."""
        self._is_open = False
        self._answers.clear()
        self.server.unwait(self)
        self.server.sessions.pop(self.id, None)

    def go_on(self) -> None:
        """Carry out the commands that have come, up to one that blocks."""
        while self._is_open and self.blocked is None:
            words = self._reader.gets()
            if words is False:
                return
            if words.__class__ is not list or not _ONLY_BYTES.issuperset(map(type, words)):
                raise UnknownCommand(f"no command: {words!r}")
            if words:
                self.server.execute(self, words)

    def answer(self, reply: Any) -> None:
        """Send an answer at the end of the turn."""
        self._answers.append(reply if reply.__class__ is Written else encoded(reply))

    def flush(self) -> None:
        """Send the answers."""
        if self._answers:
            answers, self._answers = self._answers, []
            self._send(answers[0] if len(answers) == 1 else b"".join(answers))
