"""Faults on the way from one program to one node of a Redlock, which other programs see differently or not at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tests.simulation.network import Link, Way
from tests.simulation.plan import HOLDS_BACK, Fault
from tests.simulation.scheduler import Process

#: Consecutive connections that are held back.
IN_A_ROW = 2


def between(world: Any, program: int, node: int) -> Link:
    """The link between the host of a program and a node."""
    host, servers = world.workers[program % len(world.workers)].host, world.servers
    link: Link = world.network.link(host.name, servers[node % len(servers)].host.name)
    return link


def _of(world: Any, fault: Fault, seconds: float) -> Link:
    """The link that a fault troubles for that many seconds."""
    link = between(world, *divmod(fault.target % 100, 10))
    link.troubled_until = max(link.troubled_until, world.run.now + seconds)
    return link


def _cut(world: Any, fault: Fault, *, there: bool = False, back: bool = False) -> None:
    link = _of(world, fault, fault.seconds)
    link.cut_there, link.cut_back = there, back
    world.run.after(fault.seconds, link.open)


def _slow(world: Any, fault: Fault, *, share: float) -> None:
    link, usual = _of(world, fault, fault.seconds), Link().delay
    link.delay = (0.0, share * world.plan.ttl)
    world.run.after(fault.seconds, lambda: setattr(link, "delay", usual))


def _held_back(world: Any, fault: Fault, *, breaks: bool) -> bool:
    # If it breaks, another connection soon carries the end; otherwise the end waits behind the held-back data.
    link = _of(world, fault, HOLDS_BACK + (0.0 if breaks else fault.seconds))
    link.holds_back.extend([fault.seconds] * IN_A_ROW)

    def held(way: Way) -> None:
        world.run.strikes(fault.kind)
        if breaks:
            _break(way)

    link.passes, link.on_held_back = fault.target // 100, held

    def over() -> None:
        link.holds_back.clear()
        link.passes, link.on_held_back = 0, None

    world.run.after(HOLDS_BACK, over)
    return False


def _put_back_late(world: Any, fault: Fault, *, dies: bool) -> bool:
    """A node forgets the hold of the next holder of a lock, and gets it back late: the owner may be dead by then."""
    run, servers = world.run, world.servers
    node = servers[fault.target % 10 % len(servers)]

    def begin(process: Process) -> None:
        run.after(run.rng.uniform(0.0, 0.3) * world.plan.ttl, lambda: lose(process))

    def lose(process: Process) -> None:
        run.strikes(fault.kind)
        node.flush()
        link = world.network.link(process.host.name, node.host.name)
        link.troubled_until = max(link.troubled_until, run.now + HOLDS_BACK + fault.seconds)
        link.holds_back.append(fault.seconds)
        link.passes, link.on_held_back = fault.target // 100, partial(die, process) if dies else _break

    def die(process: Process, _: Way) -> None:
        for program in world.workers:
            if program.process is process:
                run.after(0.001, program.kill)
                run.after(fault.seconds, program.start)

    world.at_holds.append(begin)
    return False


def _break(way: Way) -> None:
    """The client finds the connection closed a moment after it has sent something."""
    run = way.network.run
    run.after(run.rng.choice((0.001, 0.1)), way.socket.end)


#: Faults by which a node loses data.
FORGETS = ("server restarted empty", "server flushed", "put back late", "put back late by the dead")

BY_KIND: dict[str, Callable[[Any, Fault], object]] = {
    "way cut": partial(_cut, there=True, back=True),
    "way cut there": partial(_cut, there=True),
    "way cut back": partial(_cut, back=True),
    # An answer that takes a fortieth of the ttl each way is in time; one that takes a third of it seldom is.
    "way slow": partial(_slow, share=1 / 40),
    "way very slow": partial(_slow, share=1 / 3),
    "way held back": partial(_held_back, breaks=False),
    "way held back and broken": partial(_held_back, breaks=True),
    "put back late": partial(_put_back_late, dies=False),
    "put back late by the dead": partial(_put_back_late, dies=True),
}
