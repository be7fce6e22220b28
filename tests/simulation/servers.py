"""Redis servers on simulated hosts: models of Redis behind the network, which stop, stall, and come back with all their
data, with older data, or with nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import hiredis
import redis.utils
from redis.connection import Connection

from tests.simulation import inside
from tests.simulation.network import Network, Socket, Way
from tests.simulation.redis import RedisModel
from tests.simulation.redis.dataset import Scores
from tests.simulation.scheduler import Host, Simulation, simulation

#: A key, its value, and the ms since the epoch at which it ends.
Entry = tuple[str, Any, int | None]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the checker found in a server's data; it stays valid for some time unless something is written."""

    of: Any
    version: int
    since: int
    until: float
    living: list[Entry]
    values: list[tuple[str, bytes]]
    #: The keys without an end.
    endless: list[str]

    @staticmethod
    def of_data(data: Any, version: int, now: int) -> _Seen:
        """The data as a client finds them in this millisecond: a key is there until the end of its last millisecond."""
        every = [(key.decode(), value, data.ends_at.get(key)) for key, value in data.values.items()]
        every += [hold for key, value, _ in every if isinstance(value, Scores) for hold in inside.holds_in(key, value)]
        living = [it for it in every if it[2] is None or it[2] >= now]
        inside.check_keys(key for key, _, _ in every)
        values = [(key, value) for key, value, _ in living if isinstance(value, bytes)]
        inside.check_holds(values)
        endless = [key for key, _, ends_at in living if ends_at is None]
        until = min((ends_at + 1 for _, _, ends_at in living if ends_at is not None), default=float("inf"))
        return _Seen(data, version, now, until, living, values, endless)


class Server:
    """A Redis server.

    Attributes:
        model: its data and behaviour; None while it is down.
        empty_since: when it was last empty.
    """

    def __init__(self, run: Simulation, network: Network, host: Host, *, port: int = 6379) -> None:
        self.run, self.network, self.host = run, network, host
        self.address = (host.name, port)
        self.model: RedisModel | None = None
        self.stalled = False
        #: Until when the connection of a woken waiter breaks before the wake-up arrives.
        self.wakes_nobody_until = 0.0
        self._peers: list[_Peer] = []
        #: What arrives while it is stalled.
        self._held_up: deque[Callable[[], None]] = deque()
        self._timer: float | None = None
        self._data: Any = None
        self.empty_since = 0.0
        #: Called with the model after each start.
        self.on_start: list[Callable[[RedisModel], None]] = []
        self._saved: Any = None
        self._seen: _Seen | None = None
        network.listening[self.address] = self._accept
        self.start()

    def clock(self) -> float:
        """Its wall clock."""
        return self.host.wall_clock(self.run.now)

    def start(self, data: Any = None) -> None:
        """Start with these data."""
        if data is None:
            self.empty_since = self.run.now
        self.model = RedisModel(self.clock, randint=self.run.rng.randint, dataset=data)
        self.run.note("starts", "with data" if data is not None else "empty", by=self.host.name)
        for on_start in self.on_start:
            on_start(self.model)

    def save(self) -> None:
        """Save a copy of the data for a later restart."""
        if self.model is not None:
            self._saved = self.model.dataset.copy()

    def crash(self) -> None:
        """The process ends, and its connections with it."""
        if self.model is None:
            return
        self._data, self.model = self.model.dataset.copy(), None
        self.stalled = False
        self._held_up.clear()
        self.run.note("crashes", by=self.host.name)
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.way.server_is_gone()

    def restart(self, having: str) -> None:
        """Come back with "all" its data, with the data last "saved", or with "nothing"."""
        if self.model is None:
            self.start({"all": self._data, "saved": self._saved, "nothing": None}[having])

    def flush(self) -> bool:
        """FLUSHALL, if it is there: it forgets everything, but its connections stay."""
        if self.model is not None:
            self.model.flush()
            self.empty_since, self._seen = self.run.now, None
            self.run.note("is flushed", by=self.host.name)
        return self.model is not None

    def clear(self, part: str) -> None:
        """Forget the keys with this in their names, as if somebody had deleted them."""
        if self.model is not None:
            data = self.model.dataset
            for key in [key for key in data.values if part.encode() in key]:
                del data.values[key]
                data.ends_at.pop(key, None)
            self._seen = None
            self.run.note("clears", part, by=self.host.name)

    def evict(self) -> None:
        """Forget a key, like a server whose memory is full."""
        if self.model is not None and (values := self.model.dataset.values):
            key = self.run.rng.choice(sorted(values))
            del values[key]
            self.model.dataset.ends_at.pop(key, None)
            self.run.note("evicts", key.decode(), by=self.host.name)

    def stall(self) -> None:
        """Carry out nothing for now; the kernel buffers what arrives."""
        self.stalled = True
        self.run.note("stalls", by=self.host.name)

    def go_on(self) -> None:
        """Carry out what has arrived meanwhile, and go on."""
        if self.stalled:
            self.stalled = False
            self.run.note("goes on", by=self.host.name)
            while self._held_up and not self.stalled:
                self._held_up.popleft()()
            self._look_at_the_clock()

    def forget_scripts(self) -> None:
        """SCRIPT FLUSH."""
        if self.model is not None:
            self.model.scripts.clear()

    def close_connections(self) -> bool:
        """CLIENT KILL, if there are any."""
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.session.close()
            peer.way.server_is_gone()
        return bool(peers)

    def wake_all(self) -> bool:
        """Wake waiters, if there are any, as if each lock for which somebody waits were freed."""
        if self.model is None:
            return False
        nobody = self.model.connect(lambda _: None, address="nobody:1")
        members = [
            member for key, members, _ in self.living() if inside.part_of(key) == "waiting" for member in members
        ]
        woken = [member for member in members if inside.mailbox_in(member) in self.model._waiting]
        for member in woken:
            push = b"RPUSH", inside.mailbox_in(member), inside.name_of_waiter(member)
            nobody.receive(hiredis.pack_command(push))
        nobody.close()
        return bool(woken)

    # For the checker

    def keeps(self, key: bytes, owner: bytes) -> bool:
        """Whether the key belongs to this owner; while the server is down, its last data count."""
        data = self._data if self.model is None else self.model.dataset
        value, now = data.values.get(key), self.clock() * 1000
        if isinstance(value, Scores):
            return any(element.startswith(owner) and end > now for element, end in value.items())
        if value.__class__ is not bytes or not value.startswith(owner):
            return False
        ends_at = data.ends_at.get(key)
        return ends_at is None or ends_at > now

    def remembers(self, seconds: float) -> bool:
        """Whether it has all writes of the last seconds: otherwise it has no vote in a Redlock."""
        return (self.run.now - self.empty_since) * self.host.rate >= seconds

    def asked_for(self) -> float | None:
        """Seconds since it was first asked for a lock of a Redlock, as it counts them itself: it has a vote one ttl
        after that. None if nobody has asked since it was last empty.
        """
        ends_at = next((ends_at for key, _, ends_at in self.living() if inside.part_of(key) == "memory"), None)
        return None if ends_at is None else self.clock() - (ends_at / 1000 - inside.MEMORY_TTL)

    def living(self) -> list[Entry]:
        """Its living keys; the same list while nothing changes."""
        return self._see().living

    def _see(self) -> _Seen:
        data, version = (self._data, -1) if self.model is None else (self.model.dataset, self.model.offset)
        now = int(self.clock() * 1000)
        seen = self._seen
        if seen is None or seen.of is not data or seen.version != version or not seen.since <= now < seen.until:
            seen = self._seen = _Seen.of_data(data, version, now)
        return seen

    def without_end(self, part: str | None = None) -> str | None:
        """A key that has no time to live; with this part, if it is given."""
        return next((key for key in self._see().endless if part in (None, inside.part_of(key))), None)

    def living_values(self) -> list[tuple[str, bytes]]:
        """Its string values, with their keys; the same list while nothing changes."""
        return self._see().values

    def held(self, names: frozenset[str] = frozenset()) -> str | None:
        """A held lock that is not of a waiting message; locks outside of tasks have these names."""
        keys = (key for key, _, _ in self.living() if inside.OF_QUEUE not in key)
        return next((key for key in keys if inside.part_of(key) == "run" or key in names), None)

    def do(self, action: Callable[[], None]) -> None:
        """Do it now, or when the server goes on."""
        if self.stalled:
            self._held_up.append(action)
        elif self.model is not None:
            action()
            self._look_at_the_clock()

    def forget(self, peer: _Peer) -> None:
        if peer in self._peers:
            self._peers.remove(peer)

    def _accept(self, way: Way, client: Host) -> _Peer | None:
        if self.model is None:
            return None
        peer = _Peer(self, way, self.model, client)
        self._peers.append(peer)
        return peer

    def _look_at_the_clock(self) -> None:
        """Let blocked commands time out."""
        model = self.model
        timer = None if model is None else model.next_timer()
        if model is None or timer is None or timer == self._timer:
            return
        self._timer = timer

        def ring() -> None:
            self._timer = None
            if self.model is model and not self.stalled:
                model.run_timers()
                self._look_at_the_clock()

        self.run.after(max(timer - self.clock(), 0.0) / self.host.rate, ring)


class _Peer:
    """The server's side of a connection."""

    def __init__(self, server: Server, way: Way, model: RedisModel, client: Host) -> None:
        self._server, self.way = server, way
        self.session = model.connect(self._answer, address=f"{client.name}:{server.run.next_number()}")

    def receive(self, data: bytes) -> None:
        self._server.do(partial(self.session.receive, data))

    def _answer(self, data: bytes) -> None:
        server, wakes = self._server, data.startswith(b"*2\r\n") and inside.MAILBOX in data
        if wakes and server.run.now < server.wakes_nobody_until:
            server.run.note("wakes nobody", by=server.host.name)
            server.run.strikes("wake-ups lost")
            server.forget(self)
            self.session.close()
            self.way.server_is_gone()
        else:
            self.way.answer(data)

    def close(self) -> None:
        self._server.forget(self)
        self._server.do(self.session.close)


def dial(connection: Any) -> Socket:
    """Replaces redis-py's way to connect."""
    run = simulation()
    task = run.current
    assert task is not None
    made = Socket()
    address = (connection.host, int(connection.port))
    made.dial(run.network, task.process.host, address, connection.socket_connect_timeout)  # type: ignore[attr-defined]
    made.settimeout(connection.socket_timeout)
    return made


def patch_redis_py() -> None:
    """Make each connection of redis-py in this interpreter a simulated one."""
    Connection._connect = dial  # type: ignore[method-assign,assignment]
    redis.utils.get_lib_version = lambda: "0"  # The original reads a file for each connection.
