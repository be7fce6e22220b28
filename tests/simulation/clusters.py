"""A Redis Cluster of two nodes, between which slots move while clients ask for their keys.

Both nodes have the same data and the same clock, so that the checkers find all keys in one place; a client finds at
each node only the keys of the slots that it has. So no key is copied when a slot moves.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from tests.simulation import inside
from tests.simulation.plan import Fault, Message, Plan
from tests.simulation.redis import ClusterMap, slot_of
from tests.simulation.redis.cluster import SLOTS
from tests.simulation.redis.replies import CommandError
from tests.simulation.scheduler import simulation
from tests.simulation.servers import Server

#: Faults that leave each node its data.
KINDS = {"child killed", "worker killed", "connections closed", "server stalled", "requests held back", "slow"}
KINDS |= {"cut", "cut there", "cut back", "server forgets its scripts", "delivered again", "acknowledgement lost"}


def a_slot_moves(plan: Plan, rng: random.Random) -> Plan:
    """The lock server is a cluster; the slot of a lock moves, and perhaps back again."""
    if rng.random() < 0.25:
        return _moves_unseen(plan, rng)
    last = max(message.at for message in plan.messages) + plan.ttl / 2
    times = sorted(round(rng.uniform(0.1, last), 3) for _ in range(rng.choice((1, 1, 2, 3))))
    moves = [Fault(at, "slot moves", rng.randrange(100), rng.choice((0.0, 0.05, 0.4, 2.0))) for at in times]
    faults = [*moves, *(fault for fault in plan.faults if fault.kind in KINDS)]
    faults.sort(key=lambda fault: fault.at)
    return replace(plan, nodes=1, is_cluster=True, faults=tuple(faults))


def _moves_unseen(plan: Plan, rng: random.Random) -> Plan:
    """Nobody but its holder asks for a lock whose slot moves: a renewal finds that out."""
    ttl = rng.choice((6.0, 10.0))
    message = Message(0.1, rng.choice(("shop.late", "shop.again")), "a", 0, f"takes={1.2 * ttl:g}")
    faults = (Fault(round(rng.uniform(0.4, 0.6) * ttl, 3), "slot moves", 0, rng.choice((0.0, 0.3))),)
    plan = replace(plan, messages=(message,), faults=faults, nodes=1, is_cluster=True)
    return replace(plan, ttl=ttl, workers=1, concurrency=1)


@dataclass(frozen=True, slots=True)
class _Map(ClusterMap):
    """The map of a node, which knows whether all keys of a slot that it is about to give away are gone already."""

    is_empty: bool = False
    #: Whether clients may still believe that the slot that is to come is here, since it was here before.
    was_here: bool = False

    def redirection(self, keys: Any, held: int, *, asking: bool, is_seven: bool = True) -> CommandError | None:
        slot = slot_of(keys[0]) if keys else -1
        # One key alone may have been found here by a SCAN.
        if slot in self.importing and not self.was_here and len(keys) > 1:
            simulation().must(asking, "slot {} is about to move to {}, and is asked for there", slot, self.myself)
        here = 0 if self.is_empty and slot in self.migrating else held
        return ClusterMap.redirection(self, keys, here, asking=asking, is_seven=is_seven)


class Cluster:
    """Makes a cluster of the world's lock server and a second node."""

    def __init__(self, world: Any) -> None:
        first, host = world.servers[0], world.host("redis1")
        host.rate, host.steady, host.wall = first.host.rate, first.host.steady, first.host.wall
        self._first: Any = first
        second: Any = Server(world.run, world.network, host)
        self._second = second
        world.nodes = [first, second]
        world.settings["singleton_lock_backend"] = "redis+cluster://redis0:6379"
        second.model.dataset = first.model.dataset
        second.model.on_write = self._written
        #: By slot: whether the second node has it. Then the slots that have moved, and the one that is moving.
        self._is_second = [slot * 2 >= SLOTS for slot in range(SLOTS)]
        self._moved: set[int] = set()
        self._moving: int | None = None
        self._show()

    def move(self, target: int, seconds: float) -> bool:
        """Let the slot of a lock move, if there is one and none is moving: first its keys, then the slot itself."""
        keys = [key for key, _, _ in self._first.living()]
        slots = sorted({slot_of(key.encode()) for key in keys if inside.part_of(key) == "run"})
        if not slots or self._moving is not None:
            return False
        slot = self._moving = slots[target % len(slots)]
        run = self._first.run
        run.note("is about to move", f"slot {slot}", by="cluster")
        self._show()
        run.after(seconds / 2, lambda: self._show(is_empty=True))
        run.after(seconds, lambda: self._end(slot))
        return True

    def _end(self, slot: int) -> None:
        self._is_second[slot] = not self._is_second[slot]
        self._moved.add(slot)
        self._moving = None
        self._first.run.note("has moved", f"slot {slot}", by="cluster")
        self._show()

    def _show(self, *, is_empty: bool = False) -> None:
        """Let the nodes know where the slots are; a client that is blocked for one that has left hears of it."""
        first, second, slot = self._first.address, self._second.address, self._moving
        parts = [(has, [*slots]) for has, slots in groupby(range(SLOTS), self._is_second.__getitem__)]
        ranges = [(slots[0], slots[-1], [second if has else first]) for has, slots in parts]
        for node in (self._first, self._second):
            if slot is None:
                node.model.move_slots(_Map(node.address, ranges))
                continue
            other = {slot: first if node is self._second else second}
            is_here = self._is_second[slot] is (node is self._second)
            what = {"migrating" if is_here else "importing": other}
            node.model.cluster = _Map(node.address, ranges, **what, is_empty=is_empty, was_here=slot in self._moved)

    def _written(self, *_: Any) -> None:
        self._first.model.offset += 1  # The checkers look again.
