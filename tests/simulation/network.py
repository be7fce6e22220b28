"""Sockets of simulated processes, and the links between hosts: how long messages take, and which are lost.

Data handed to the kernel outlive their process: they still arrive, and then the end of the connection.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from tests.simulation.scheduler import Ended, Host, Simulation, Task, active, simulation


class Descriptors(dict[int, Any]):
    """The open descriptors of all processes."""

    def add(self, it: Any) -> int:
        run = simulation()
        fd = 1000 + run.next_number()
        self[fd] = it
        return fd


def descriptors() -> Descriptors:
    """The descriptors of the simulation that is under way."""
    run = simulation()
    found: Descriptors | None = getattr(run, "descriptors", None)
    if found is None:
        found = run.descriptors = Descriptors()  # type: ignore[attr-defined]
    return found


class Peer(Protocol):
    """A server's side of a connection."""

    def receive(self, data: bytes) -> None:
        """Bytes from the client have arrived."""

    def close(self) -> None:
        """The client is gone."""


@dataclass(eq=False)
class Link:
    """How messages get from one host to another, in both directions. A fault changes it for a while.

    Attributes:
        delay: least and most seconds that a message takes.
        usual: the same when nothing is wrong.
        cut_there, cut_back: whether data do not arrive: they wait until the link is open again, as TCP would repeat
            them, or are lost with their connection.
        holds_back: seconds for which data to the server are held back, as by a proxy, on each of the next connections:
            they arrive then, even if their connection was closed.
        passes: how many messages still pass before that.
        on_held_back: called with each connection that is held back.
    """

    delay: tuple[float, float] = (0.0001, 0.0008)
    usual: tuple[float, float] = (0.0001, 0.0008)
    cut_there: bool = False
    cut_back: bool = False
    holds_back: deque[float] = field(default_factory=deque)
    passes: int = 0
    on_held_back: Callable[[Way], None] | None = None
    #: Until when something delays or keeps messages on this link.
    troubled_until: float = 0.0
    #: Called when the link is open again.
    opened: list[Callable[[], None]] = field(default_factory=list)

    def is_cut_there(self) -> bool:
        return self.cut_there

    def is_cut_back(self) -> bool:
        return self.cut_back

    def open(self) -> None:
        """Let messages arrive again."""
        self.cut_there = self.cut_back = False
        opened, self.opened = self.opened, []
        for go_on in opened:
            go_on()


class Network:
    """All links, and the listening servers.

    Args:
        latency: most seconds that a message takes, if that is more than usual; some hosts are near.
    """

    def __init__(self, run: Simulation, *, latency: float = 0.0) -> None:
        self.run = run
        self._latency = latency
        self._links: dict[tuple[str, str], Link] = {}
        #: The times at which connections began to be held back.
        self.held_back_at: list[float] = []
        #: By address: makes the server's side of a connection, or None if the server is down.
        self.listening: dict[tuple[str, int], Callable[[Way, Host], Peer | None]] = {}

    def link(self, client: str, server: str) -> Link:
        """The link between two hosts."""
        found = self._links.get((client, server))
        if found is None:
            found = self._links[client, server] = Link()
            if self._latency:
                found.usual = found.delay = (0.0001, self._latency * self.run.rng.choice((0.1, 1.0)))
        return found


class Way:
    """A connection: bytes arrive in the order in which they were sent, in each direction."""

    def __init__(self, network: Network, link: Link, its: Socket) -> None:
        self.network, self.link, self.socket = network, link, its
        self.peer: Peer | None = None
        self.there = _Direction(network.run, link, link.is_cut_there)
        self.back = _Direction(network.run, link, link.is_cut_back)
        self.broken = False
        self._is_held_back = False

    def send(self, data: bytes) -> None:
        """The client sends."""
        if self.link.holds_back and not self._is_held_back and self.link.passes:
            self.link.passes -= 1
        elif self.link.holds_back and not self._is_held_back:
            self._is_held_back = True
            self.network.held_back_at.append(self.network.run.now)
            self.there.hold_back(self.link.holds_back.popleft())
            if self.link.on_held_back is not None:
                self.link.on_held_back(self)
        self.there.carry(self, partial(self._arrive, data), always=self._is_held_back)

    def answer(self, data: bytes) -> None:
        """The server sends."""
        self.back.carry(self, partial(self.socket.arrive, data))

    def client_is_gone(self, *, at_once: bool = False) -> None:
        """The client has closed it: the server notices after it got what was sent; with `at_once`, data under way are
        dropped.
        """
        if at_once:
            self.broken = True
        self.there.carry(self, self._close_peer, always=True)

    def server_is_gone(self) -> None:
        """The server's process has ended: its kernel reports that."""
        self.peer = None
        self.back.carry(self, self.socket.end)

    def _arrive(self, data: bytes) -> None:
        if self.peer is not None and (self._is_held_back or not self.broken):
            self.peer.receive(data)
        elif self.peer is None:
            self.server_is_gone()

    def _close_peer(self) -> None:
        peer, self.peer = self.peer, None
        if peer is not None:
            peer.close()


class _Direction:
    """One direction of a connection."""

    __slots__ = ("_is_cut", "_kept", "_last", "_link", "_run")

    def __init__(self, run: Simulation, link: Link, is_cut: Callable[[], bool]) -> None:
        self._run, self._link, self._is_cut = run, link, is_cut
        #: When the last message arrives, and the messages that wait until the link is open again.
        self._last = 0.0
        self._kept: deque[_Message] = deque()

    def carry(self, way: Way, arrive: Callable[[], None], *, always: bool = False) -> None:
        """Let something arrive after what was sent before."""
        low, high = self._link.delay
        self._last = max(self._last, self._run.now + low + (high - low) * self._run.rng.random())
        self._run.at(self._last, _Message(self, way, arrive, always).land)

    def hold_back(self, seconds: float) -> None:
        """Let what is sent from now on arrive no sooner than that."""
        self._last = max(self._last, self._run.now + seconds)

    def lets_pass(self, message: _Message) -> bool:
        """Whether a message may arrive now; otherwise it arrives later, after those that were sent before."""
        if not self._kept:
            if not self._is_cut():
                return True
            self._wait()
        self._kept.append(message)
        return False

    def _wait(self) -> None:
        run, link = self._run, self._link
        link.opened.append(lambda: run.after(run.rng.uniform(*link.delay), self._go_on))

    def _go_on(self) -> None:
        while self._kept:
            if self._is_cut():
                self._wait()
                return
            self._kept.popleft().arrive()


class _Message:
    """A message under way. Nothing that it refers to refers back: so it is freed as soon as it has arrived."""

    __slots__ = ("_always", "_arrive", "_direction", "_way")

    def __init__(self, direction: _Direction, way: Way, arrive: Callable[[], None], always: bool) -> None:
        self._direction, self._way, self._arrive, self._always = direction, way, arrive, always

    def land(self) -> None:
        if self._direction.lets_pass(self):
            self.arrive()

    def arrive(self) -> None:
        if self._always or not self._way.broken:
            self._arrive()


class Socket:
    """A client's socket, as redis-py and the package use it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._timeout: float | None = None
        self._incoming = b""
        self._ended = False
        self._closed = False
        self._lingers = True
        self._way: Way | None = None
        self.watchers: list[Task] = []
        self._fd = descriptors().add(self)

    def dial(self, network: Network, client: Host, address: tuple[str, int], timeout: float | None) -> None:
        """Connect, and wait for the answer.

        Raises:
            OSError: the connection is refused, or the answer does not come in time.
        """
        run = network.run
        task = run.current
        assert task is not None
        link = network.link(client.name, address[0])
        way = self._way = Way(network, link, self)
        answer: list[bool] = []

        def reach() -> None:
            listen = network.listening.get(address)
            if listen is not None and not way.broken:
                way.peer = listen(way, client)
            accepted = way.peer is not None
            way.back.carry(way, lambda: heard(accepted))

        def heard(accepted: bool) -> None:
            answer.append(accepted)
            run.wake(task)

        way.there.carry(way, reach)
        until = run.now + (timeout if timeout is not None else 60.0)
        while not answer and run.now < until:
            if not run.park(until - run.now):
                break
        if not answer:
            way.client_is_gone(at_once=True)
            raise TimeoutError("timed out")
        if not answer[0]:
            raise ConnectionRefusedError("refused")
        task.process.at_end.append(self._process_ended)
        self._timeout = timeout

    # What the kernel does

    def arrive(self, data: bytes) -> None:
        """Bytes have arrived."""
        if not self._closed:
            self._incoming += data
            self._wake()

    def end(self) -> None:
        """The server closed it."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        run = active()
        for task in list(self.watchers):
            if run is not None and not run.over:
                run.wake(task)

    def _process_ended(self) -> None:
        if not self._closed and self._way is not None:
            self._closed = True
            self._way.client_is_gone()

    # What a program sees

    @property
    def readable(self) -> bool:
        return bool(self._incoming) or self._ended or self._closed

    @property
    def writable(self) -> bool:
        return True

    def sendall(self, data: Any) -> None:
        self.send(data)

    def send(self, data: Any) -> int:
        self._check()
        if self._ended:
            raise BrokenPipeError("broken pipe")
        assert self._way is not None
        self._way.send(bytes(data))
        return len(data)

    def recv(self, count: int, *_: int) -> bytes:
        self._check()
        run = simulation()
        if not self._incoming and not self._ended:
            if self._timeout == 0:
                raise BlockingIOError("nothing there")
            task = run.current
            assert task is not None
            until = None if self._timeout is None else run.now + self._timeout
            while not self.readable:
                self.watchers.append(task)
                try:
                    woken = run.park(None if until is None else max(until - run.now, 0.0))
                finally:
                    if task in self.watchers:
                        self.watchers.remove(task)
                if not woken and not self.readable:
                    raise TimeoutError("timed out")
            self._check()
        data, self._incoming = self._incoming[:count], self._incoming[count:]
        return data

    def recv_into(self, buffer: Any, *_: int) -> int:
        data = self.recv(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _check(self) -> None:
        run = active()
        if run is None or run.over:
            raise Ended
        if self._closed:
            raise OSError(9, "Bad file descriptor")

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def gettimeout(self) -> float | None:
        return self._timeout

    def setblocking(self, blocking: bool) -> None:
        self._timeout = None if blocking else 0.0

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if option == socket.SO_LINGER:
            self._lingers = False

    def fileno(self) -> int:
        return self._fd

    def shutdown(self, _: int) -> None:
        """Do nothing: `close` follows."""

    def close(self) -> None:
        run = active()
        if self._closed or run is None or run.over:
            return
        self._closed = True
        descriptors().pop(self._fd, None)
        if self._way is not None:
            self._way.client_is_gone(at_once=not self._lingers)
        self._wake()
