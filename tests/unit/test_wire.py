"""Sockets that never block keep the promises of a socket with a timeout."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from celery_singleton_lock.stores.redis.wire import Wire
from tests.patience import LIMIT

#: More than fits into the buffers of a socket.
LARGE = b"x" * 20_000_000


class Kept(socket.socket):
    """Waits in its own way, like a TLS socket or a greenlet socket."""


@pytest.fixture(params=[socket.socket, Kept])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Wire, socket.socket]]:
    one, other = socket.socketpair()
    with request.param(fileno=one.detach()) as its, other:
        its.settimeout(LIMIT)
        yield Wire(its), other


def test_receive_waits_for_data(ends: tuple[Wire, socket.socket]) -> None:
    wire, other = ends
    threading.Timer(0.05, other.sendall, [b"later"]).start()
    assert wire.receive(100) == b"later"


def test_receive_times_out(ends: tuple[Wire, socket.socket]) -> None:
    wire, other = ends
    wire.wait_at_most(0.01)
    with pytest.raises(TimeoutError):
        wire.receive(100)
    other.sendall(b"late")
    assert wire.receive(100) == b"late"


def test_receive_without_waiting(ends: tuple[Wire, socket.socket]) -> None:
    wire, other = ends
    wire.wait_at_most(0.0)
    with pytest.raises(BlockingIOError):
        wire.receive(100)
    other.sendall(b"there")
    wire.wait_at_most(LIMIT)
    assert wire.receive(100) == b"there"


def test_everything_is_sent_even_if_the_system_takes_it_in_parts(ends: tuple[Wire, socket.socket]) -> None:
    wire, other = ends
    received = bytearray()

    def read() -> None:
        while len(received) < len(LARGE):
            received.extend(other.recv(1_000_000))

    reader = threading.Thread(target=read)
    reader.start()
    wire.send_all(LARGE)
    reader.join(LIMIT)
    assert len(received) == len(LARGE)


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_send_to_nobody_times_out(ends: tuple[Wire, socket.socket], seconds: float) -> None:
    wire, _ = ends
    wire.wait_at_most(seconds)
    with pytest.raises((TimeoutError, BlockingIOError)):
        wire.send_all(LARGE)


def test_closed_peer_is_noticed(ends: tuple[Wire, socket.socket]) -> None:
    wire, other = ends
    other.close()
    assert wire.receive(100) == b""
    with pytest.raises(OSError, match=r"pipe|reset"):
        wire.send_all(LARGE)
