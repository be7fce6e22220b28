"""A Redlock whose nodes disagree (`disagreements.py`), and what must hold for each node: programs as in `locks.py`,
some of whose uses are copies of messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

from redis import Redis

from tests.simulation import holds, inside, trouble, ways
from tests.simulation.copies import Copies
from tests.simulation.disagreements import COPY_OF
from tests.simulation.locks import OFTEN, UNUSED, WELL, LocksChecker, Turn
from tests.simulation.program import Program
from tests.simulation.servers import Entry, Server
from tests.simulation.world import World

#: Seconds for which a lock may be free while somebody asks for it and nothing goes wrong.
NOBODYS = 3.0

#: Milliseconds before its expiry from which on a hold may be gone.
NEARLY = 5

#: Rates of clocks: those of two hosts differ by nearly the one percent that is allowed.
RATES = (0.9955, 1.0, 1.0045)

#: Faults that do not matter; those of a way matter only to the process that uses it.
NO_MATTER = frozenset({*trouble.HARMLESS, *ways.BY_KIND} - {*ways.FORGETS})

#: Faults that delay nothing; neither do those by which a node forgets.
DELAYS_NOTHING = NO_MATTER | {"server restarted empty", "server flushed"}


class _Found(NamedTuple):
    """The state of a node.

    Attributes:
        model: of the server, and since when it has not lost anything.
        living: all its living keys.
        holds: by the name of a lock, its owner and its expiry in ms.
        pids: by the name of a lock, the process that asked for it; 0 if the node does not know it.
        over: keys that say that an owner or an attempt is over.
    """

    model: tuple[Any, float]
    living: Any
    holds: dict[str, tuple[str, int | None]]
    pids: dict[str, int]
    over: frozenset[str]

    @classmethod
    def of(cls, server: Server, living: list[Entry], names: Collection[str]) -> _Found:
        values = {key: (inside.hold_of(value), ends_at) for key, value, ends_at in living if key in names}
        held = {name: (hold.owner, ends_at) for name, (hold, ends_at) in values.items()}
        pids = {name: hold.pid for name, (hold, _) in values.items()}
        over = frozenset(key for key, _, _ in living if inside.part_of(key) == "tombstone")
        return cls((server.model, server.empty_since), living, held, pids, over)


def begin(world: World) -> NodesChecker:
    """Start the programs, each on its own host; returns the checker."""
    checker = NodesChecker(world)
    for number in range(world.plan.workers):
        program = Program(world, world.host(f"host{number}"), f"p{number}", checker.live)
        world.workers.append(program)
    for host in world.hosts:
        host.rate = world.run.rng.choice(RATES)
    for program in world.workers:
        program.start()
    return checker


class NodesChecker(LocksChecker):
    """What must hold for the data of each node, besides what must hold for locks."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._copies = Copies(self)
        self._next = 0.0
        self._last: dict[Server, _Found] = {}
        #: By the beginning of the owner: the uses that have got a lock.
        self._turns: dict[str, Turn] = {}
        self._left_since: dict[tuple[Server, str, str], float] = {}
        self._nobodys_since: dict[str, float] = {}
        self._kept_until: dict[Turn, float] = {}
        #: By the beginning of the owner: when the lock was given back.
        self._freed_at: dict[str, float] = {}
        #: Holds that a node took up when it did not remember any more that their owner had given the lock back.
        self._came_late: set[tuple[Server, str, str]] = set()
        self._settles += trouble.GIVEN_UP
        self.run.at(self.plan.calm_at + 2 * self._settles, lambda: None)  # By then, held-back data have arrived.
        self.forgets = any(fault.kind in ways.FORGETS for fault in world.plan.faults)
        # If a node forgets its counter, the clocks of the clients matter.
        self._fences_grow = not self.forgets

    # What the programs do

    def _use(self, turn: Turn, clients: list[Redis]) -> None:
        copy = next((way for way in turn.use.ways if way.startswith(COPY_OF)), None)
        if copy is None:
            super()._use(turn, clients)
        else:
            turn.lock = self._lock(turn, clients)
            self._copies.deliver(turn, copy.removeprefix(COPY_OF))

    def _holds(self, turn: Turn) -> None:
        super()._holds(turn)
        awaited, self.world.at_holds = self.world.at_holds, []
        for befall in awaited:
            befall(turn.process)
        self._turns[turn.lease.owner] = turn
        if self._fences_grow and self._trusts(turn):
            self._fence_is_known(turn)

    def _release(self, turn: Turn) -> None:
        if self._trusts(turn) and self._is_kept(turn):
            self._kept_until[turn] = turn.lease.trusted_until
        super()._release(turn)
        self._freed_at[turn.lease.owner] = self.run.now

    # What must hold

    def look(self) -> None:
        """Check, whenever time is about to advance."""
        super().look()
        for server in self.world.servers:
            self._look_at(server)
        if self.run.now >= self._next:
            self._next = self.run.now + OFTEN
            self._is_had_by_who_asks()
            self._nothing_is_left()

    def _fence_is_known(self, turn: Turn) -> None:
        """Check that a majority has counted up to a fence when it is given out: any later majority counts on."""
        name, fence, servers = turn.use.name, turn.lease.fence, self.world.servers
        known = [int(dict(server.living_values()).get(inside.fence_key(name, is_plain=True), 0)) for server in servers]
        is_known = sum(it >= fence for it in known) * 2 > len(servers)
        self.run.must(is_known, "{}: use {} has fence {}, of {}", name, turn.use.number, fence, known)

    def _told_gone(self, turn: Turn) -> None:
        until = self._kept_until.get(turn, 0.0)
        if not self.forgets:
            is_over, what = until <= turn.process.host.clock(self.run.now), (turn.use.name, turn.use.number)
            self.run.must(is_over, "{}: use {} hears that its lock was gone, which most nodes had", *what)

    def _is_kept(self, turn: Turn) -> bool:
        owner = turn.lease.owner.encode()
        keeping = [server.keeps(turn.use.name.encode(), owner) for server in self.world.servers]
        return sum(keeping) * 2 > len(keeping)

    def _look_at(self, server: Server) -> None:
        """Check the data of a node if they have changed."""
        living, last = server.living(), self._last.get(server)
        if last is not None and last.living is living:
            return
        found = _Found.of(server, living, self.limits)
        self._last[server] = found
        endless, must, host = server.without_end(), self.run.must, server.host.name
        must(endless is None, "{} on {} has no time to live", endless, host)
        for name, (owner, _) in found.holds.items():
            is_open = inside.tombstone_key(name, owner) not in found.over
            must(is_open, "{} holds {} for {}, of whom it knows that that is over", host, name, owner)
        self._note_late(server, {} if last is None else last.holds, found)
        if last is not None and last.model == found.model:
            self._lets_go(server, last, found)
            self._takes_up(server, last, found)

    def _note_late(self, server: Server, before: dict[str, tuple[str, int | None]], found: _Found) -> None:
        """Note what was taken up for an owner that gave the lock back so long ago that the node has forgotten that."""
        for name, (owner, _) in found.holds.items():
            if before.get(name, ("", None))[0] != owner and self._is_old(owner):
                self._came_late.add((server, name, owner))

    def _lets_go(self, server: Server, last: _Found, found: _Found) -> None:
        """Check that a hold stays until its expiry, or until it is given up by name."""
        for name, (owner, ends_at) in last.holds.items():
            now_of, _ = found.holds.get(name, ("", 0.0))
            is_over = ends_at is not None and server.clock() * 1000 > ends_at - NEARLY
            if not is_over and inside.tombstone_key(name, owner) not in found.over:
                stays, what = now_of == owner, (server.host.name, name, owner)
                self.run.must(stays, "{} lets go of {}, which it held for {}", *what)

    def _takes_up(self, server: Server, last: _Found, found: _Found) -> None:
        """Check that a hold does not come back after its owner knows that it is gone."""
        for name, (owner, _) in found.holds.items():
            turn = self._turns.get(owner)
            if turn is None or last.holds.get(name, ("", 0.0))[0] == owner:
                continue
            if self._is_old(owner):
                continue
            host, since, has_it = turn.process.host, self._must_be_well_since, turn.lease.reason is None
            if self._is_well(host.name, server, since, but=DELAYS_NOTHING):
                what = server.host.name, name, turn.use.number
                self.run.must(has_it, "{} holds {} again for use {}, which has lost it", *what)

    def _nothing_is_left(self) -> None:
        """Check that no node that its owner can reach holds an unused lock."""
        living = {process.pid: process for process in self.run.processes if process.alive and process.runs}
        used = {turn.lease.owner for turn in self._under_way if turn.lease is not None}
        left = {}
        for server, found in self._last.items():
            for name, (owner, _) in found.holds.items():
                process = living.get(found.pids[name])
                if owner in used or process is None or server.model is None or self._is_old(owner):
                    continue
                left[server, name, owner] = process
        self._left_since = {it: self._left_since.get(it, self.run.now) for it in left}
        for (server, name, owner), since in self._left_since.items():
            host = left[server, name, owner].host
            if self._is_well(host.name, server, self._must_be_well_since):
                seconds = self.run.now - since
                what = seconds, server.host.name, name, owner
                self.run.must(seconds <= UNUSED, "for {:.1f} s: {} holds {} for {}, and nobody uses it", *what)

    def _held_by_nobody(self, server: Server) -> str | None:
        """As in the base class, but a command that came so late takes that node until its ttl is over."""
        on_it = ((name, holds.owner_of(value)) for name, value in holds.on(server, frozenset(self.limits)))
        return next((name for name, owner in on_it if (server, name, owner) not in self._came_late), None)

    @trouble.excuse
    def _is_old(self, owner: str) -> bool:
        """Whether it was given back about a ttl ago: for that long, a node refuses its late commands."""
        return self.run.now - self._freed_at.get(owner, self.run.now) > 0.95 * self.plan.ttl

    def _is_had_by_who_asks(self) -> None:
        """Check that a free lock goes to a client that asks for it."""
        now, servers = self.run.now, self.world.servers
        for name in self.limits:
            owners = Counter(found.holds[name][0] for found in self._last.values() if name in found.holds)
            is_had = any(count * 2 > len(servers) for count in owners.values())
            is_asked_for = any(turn.use.patience != 0 for turn in self.waiting[name])
            if is_had or not is_asked_for:
                self._nobodys_since.pop(name, None)
                continue
            since = self._nobodys_since.setdefault(name, now)
            if not trouble.was_there(self.world, self._must_be_well_since) and self._vote():
                seconds, count = now - since, len(self.waiting[name])
                self.run.must(
                    seconds <= NOBODYS, "for {:.1f} s: {} is nobody's, and {} ask for it", seconds, name, count
                )

    def _vote(self) -> bool:
        """Whether each node has a vote, and holds nothing for dead processes."""
        dead = {process.pid for process in self.run.processes if not process.alive}
        pids = {pid for found in self._last.values() for pid in found.pids.values()}
        asked_for = [server.asked_for() for server in self.world.servers]
        return pids.isdisjoint(dead) and all(it is not None and it >= self.plan.ttl + WELL for it in asked_for)

    @property
    def _must_be_well_since(self) -> float:
        return max(self.run.now - WELL, 0.0)

    def _is_well(self, client: str, server: Server, since: float, *, but: Collection[str] = NO_MATTER) -> bool:
        """Whether nothing was wrong between this host and this node, apart from faults of some kinds."""
        link = self.world.network.link(client, server.host.name)
        return link.troubled_until <= since and not trouble.was_there(self.world, since, but=but)
