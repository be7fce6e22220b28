"""Bytes to and from a server, by a socket with a time limit for each step.

Before each step, Python asks the system if a socket with a timeout is ready, which may take a tenth of a round trip. So
a plain socket never waits here: what it takes at once needs no such question, and if there is something to wait for,
the question is the wait. A TLS socket may have bytes that the system does not know of, and sockets of greenlets wait in
their own way: these keep their timeout.
"""

from __future__ import annotations

import math
import select
import socket
import struct

from celery_singleton_lock import clock

#: Linger for no time: closing resets the connection.
_AT_ONCE = struct.pack("ii", 1, 0)


class Wire:
    """An open socket, which is used only here from now on.

    Args:
        opened: as redis-py has connected it.
    """

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        #: How long a step may take, in seconds and in the milliseconds of a poll.
        self._seconds = opened.gettimeout()
        self._ms = _ms(self._seconds)
        #: Says when there is something to receive; None if the socket itself has a timeout.
        self._readable = _poller(opened, "POLLIN") if _is_plain(opened) else None
        if self._readable is not None:
            opened.setblocking(False)

    def wait_at_most(self, seconds: float) -> None:
        """How long a step may take from now on; 0: no step waits."""
        self._seconds, self._ms = seconds, _ms(seconds)
        if self._readable is None:
            self._socket.settimeout(seconds)

    def send_all(self, content: bytes) -> None:
        """Send all of it.

        Raises:
            OSError: it did not go in time, or never will.
        """
        if self._readable is None:
            self._socket.sendall(content)
            return
        try:
            sent = self._socket.send(content)
        except BlockingIOError:
            sent = 0
        if sent < len(content):
            self._send_rest(memoryview(content)[sent:])

    def send(self, content: bytes | bytearray) -> int:
        """Send as much of it as the system takes now; the number of bytes.

        Raises:
            OSError: it takes nothing now, or never will.
        """
        return self._socket.send(content)

    def receive(self, most: int) -> bytes:
        """What has come, or comes in time; nothing if the other end has closed it.

        Raises:
            OSError: nothing came in time, or will.
        """
        if self._readable is not None and self._ms != 0 and not self._readable.poll(self._ms):
            raise TimeoutError("timed out")
        return self._socket.recv(most)

    def fileno(self) -> int:
        return self._socket.fileno()

    def reset_at_end(self) -> None:
        """Have the system forget what the server has not got when the connection is closed."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)

    def _send_rest(self, rest: memoryview) -> None:
        writable, began = _poller(self._socket, "POLLOUT"), clock.now()
        while rest:
            left = None if self._seconds is None else max(began + self._seconds - clock.now(), 0.0)
            if not writable.poll(_ms(left)):
                raise TimeoutError("timed out")
            rest = rest[self._socket.send(rest) :]


def _is_plain(opened: socket.socket) -> bool:
    """Whether it is a plain socket of the system: not a TLS socket, nor gevent's or eventlet's, which take its name."""
    return hasattr(select, "poll") and type(opened) is socket.socket and socket.socket.__module__ == "socket"


def _poller(opened: socket.socket, event: str) -> select.poll:
    poll = select.poll()
    poll.register(opened.fileno(), getattr(select, event))
    return poll


def _ms(seconds: float | None) -> int | None:
    # Rounded up: zero would mean not to wait at all.
    return None if seconds is None else math.ceil(seconds * 1000)
