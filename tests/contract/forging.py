"""A TCP proxy that answers in a server's place."""

from __future__ import annotations

import socket
from collections.abc import Collection
from contextlib import suppress

from tests.proxy import LossyProxy


class ForgingProxy(LossyProxy):
    """Forwards to a port, except for commands that it answers itself."""

    def __init__(self, port: int) -> None:
        self._forged: dict[bytes, bytes] = {}
        self._old: Collection[socket.socket] = ()
        self._of_old = b""
        #: How many commands it has answered itself.
        self.answered = 0
        super().__init__(port)

    def forge(self, mark: bytes, answer: bytes) -> None:
        """Give this answer to all commands that have the mark in them, from now on."""
        self._forged = {mark: answer} | {one: its for one, its in self._forged.items() if one != mark}

    def be_honest(self) -> None:
        self._forged, self._old = {}, ()

    def replace(self, answer: bytes) -> None:
        """The present connections answer this to all commands; new ones reach the server."""
        self._old, self._of_old = {*self._sockets[1:]}, answer

    def _answer(self, source: socket.socket, command: bytes) -> bytes | None:
        if source in self._old:
            return self._of_old
        return next((answer for mark, answer in self._forged.items() if mark in command), None)

    def _forward(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        if is_reply:
            super()._forward(source, sink, is_reply)
            return
        with suppress(OSError):
            while data := source.recv(1 << 20):
                answer = self._answer(source, data)
                if answer is None:
                    self._open[is_reply].wait()
                    if source not in self._forsaken:
                        sink.sendall(data)
                else:
                    self.answered += 1
                    source.sendall(answer * max(data.count(b"$7\r\nEVALSHA\r\n"), 1))
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
