"""A TCP proxy to a Redis that falls silent at a command of some kind: before it, within it, or after it."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from contextlib import suppress
from typing import Literal

from celery_singleton_lock import clock
from celery_singleton_lock.stores.redis import ledger, lock_commands
from celery_singleton_lock.stores.redis.script import Script
from tests.proxy import LossyProxy

#: front: the server gets the command when the stall is over, even if nobody waits for it any more. within: it gets one
#: half before the stall and the other half after it. behind: it carries out the command, but the answer comes when the
#: stall is over.
Place = Literal["front", "within", "behind"]

#: Kinds of commands, by their text.
KINDS: dict[str, bytes] = {
    **{
        name: script.sha.encode()
        for module in (lock_commands, ledger)
        for name, script in vars(module).items()
        if isinstance(script, Script)
    },
    "BLPOP": b"BLPOP",
}


class StallingProxy(LossyProxy):
    """Forwards to a port; `stall` silences all connections at once, at the next command of a kind."""

    def __init__(self, port: int) -> None:
        self.seen: Counter[str] = Counter()
        self._armed: tuple[str, Place, float] | None = None
        self._mutex = threading.Lock()
        self._silent_until = 0.0
        #: Whether the answers are held back rather than the commands.
        self._keeps_answers = False
        self.struck = threading.Event()
        super().__init__(port)

    def stall(self, kind: str, place: Place, seconds: float) -> None:
        """Fall silent for that long at the next command of this kind; `struck` is set then."""
        with self._mutex:
            self.struck.clear()
            self._armed = kind, place, seconds

    def disarm(self) -> None:
        """Stop waiting for a command that did not come."""
        with self._mutex:
            self._armed = None

    @property
    def back_at(self) -> float:
        """The time at which it answers, or answered, again."""
        return self._silent_until

    def _forward(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                place = None if is_reply else self._strike(data)
                if place == "within":
                    sink.sendall(data[: len(data) // 2])
                    data = data[len(data) // 2 :]
                if place != "behind":
                    self._wait(is_reply)
                if is_reply and self._delay:
                    clock.sleep(self._delay)
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _strike(self, data: bytes) -> Place | None:
        kinds = {kind for kind, mark in KINDS.items() if mark in data}
        with self._mutex:
            self.seen.update(kinds)
            if self._armed is None or self._armed[0] not in kinds:
                return None
            _, place, seconds = self._armed
            self._armed = None
            self._keeps_answers = place == "behind"
            self._silent_until = clock.now() + seconds
            self.struck.set()
            return place

    def _wait(self, is_reply: bool) -> None:
        while (left := self._silent_until - clock.now()) > 0 and is_reply == self._keeps_answers:
            clock.sleep(left)
