"""Sockets that never wait by themselves keep what one with a timeout promises."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from celery_singleton_lock.stores.redis.wire import Wire
from tests.patience import LIMIT

#: More than the buffers of a socket hold.
LARGE = b"x" * 20_000_000


class Kept(socket.socket):
    """Waits in its own way, as one with TLS or one of greenlets does."""


@pytest.fixture(params=[socket.socket, Kept])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Wire, socket.socket]]:
    one, other = socket.socketpair()
    with request.param(fileno=one.detach()) as its, other:
        its.settimeout(LIMIT)
        yield Wire(its), other


def test_waits_for_what_comes(ends: tuple[Wire, socket.socket]) -> None:
    wire, other = ends
    threading.Timer(0.05, other.sendall, [b"later"]).start()
    assert wire.receive(100) == b"later"


def test_what_does_not_come_in_time(ends: tuple[Wire, socket.socket]) -> None:
    wire, other = ends
    wire.wait_at_most(0.01)
    with pytest.raises(TimeoutError):
        wire.receive(100)
    other.sendall(b"late")
    assert wire.receive(100) == b"late"


def test_step_that_may_not_wait(ends: tuple[Wire, socket.socket]) -> None:
    wire, other = ends
    wire.wait_at_most(0.0)
    with pytest.raises(BlockingIOError):
        wire.receive(100)
    other.sendall(b"there")
    wire.wait_at_most(LIMIT)
    assert wire.receive(100) == b"there"


def test_all_is_sent_though_the_system_takes_it_in_parts(ends: tuple[Wire, socket.socket]) -> None:
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
def test_what_nobody_reads_is_not_sent_forever(ends: tuple[Wire, socket.socket], seconds: float) -> None:
    wire, _ = ends
    wire.wait_at_most(seconds)
    with pytest.raises((TimeoutError, BlockingIOError)):
        wire.send_all(LARGE)


def test_end_of_the_other_side(ends: tuple[Wire, socket.socket]) -> None:
    wire, other = ends
    other.close()
    assert wire.receive(100) == b""
    with pytest.raises(OSError, match=r"pipe|reset"):
        wire.send_all(LARGE)
