"""The assumptions of the guarantees, each taken away: a plan and a world without it, and what must be seen then."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from tests.simulation.plan import FIRST, Fault, Message, Plan, Use, draw
from tests.simulation.servers import Server

#: Two at once: bodies of tasks, or holders of locks outside of tasks.
TWICE = r"runs beside|has the lock beside"


class Assumption(NamedTuple):
    """An assumption of `docs/guarantees.md`.

    Attributes:
        name: its name in plans.
        without: what happens without it.
        shows: the broken promises that are seen then; others do not count.
        kind, nodes: of the plans.
        plan: changes a plan so that the assumption does not hold.
        world: changes a world, before anything starts, so that the assumption does not hold.
    """

    name: str
    without: str
    shows: str = TWICE
    kind: str = "tasks"
    nodes: int = 1
    plan: Callable[[random.Random, Plan], Plan] = lambda _, plan: plan
    world: Callable[[Any], None] = lambda _: None


def draw_without(assumption: Assumption, seed: int) -> Plan:
    """The plan of a seed."""
    plan = draw(seed, nodes=assumption.nodes, kind=assumption.kind)
    changed = assumption.plan(random.Random(f"{assumption.name} of {seed}"), plan)
    return replace(changed, beyond=assumption.name)


def take_away(world: Any) -> None:
    """Take away from a world, before anything starts, the assumption that its plan lacks."""
    assumption, run = BY_NAME[world.plan.beyond], world.run
    fail = run.fail
    run.fail = lambda what: fail(what) if re.search(assumption.shows, what) else run.note("beside", what)
    assumption.world(world)


def _with(rng: random.Random, plan: Plan, *, kinds: Sequence[str], seconds: float = 0.3) -> Plan:
    """Add faults of these kinds to a plan."""
    until = max(sent.at for sent in (*plan.messages, *plan.uses)) + plan.ttl
    more = [
        Fault(round(rng.uniform(0.1, until), 3), kind, rng.randrange(100), round(rng.uniform(0, seconds), 3))
        for kind in kinds
    ]
    return replace(plan, faults=tuple(sorted((*plan.faults, *more), key=lambda fault: fault.at)))


def _on_two_nodes(rng: random.Random, plan: Plan, *, kind: str) -> Plan:
    """Let it happen to two of three nodes, at any time, before a renewal has given the holds back to the first."""
    at = rng.choice([sent.at for sent in (*plan.messages, *plan.uses)]) + rng.uniform(0.05, 1.0)
    node = rng.randrange(3)
    more = [Fault(round(at + 0.1 * number, 3), kind, node + number, 0.05) for number in range(2)]
    return replace(plan, faults=tuple(sorted((*plan.faults, *more), key=lambda fault: fault.at)))


def _asked_for_beside(rng: random.Random, plan: Plan) -> Plan:
    """A lock is held for long while others ask for it; two nodes forget it meanwhile."""
    held = Use(13.0, 0, 0, "a", 2, None, 9.0)
    others = [Use(round(rng.uniform(13.5, 17.0), 3), 1, 0, "a", number, None, 0.3) for number in (3, 5)]
    plan = replace(plan, workers=2, ttl=10.0, uses=(plan.uses[0], held, *others), faults=())
    at, node = rng.uniform(13.2, 16.0), rng.randrange(3)
    faults = [Fault(round(at + 0.1 * it, 3), "server restarted empty", node + it, 0.05) for it in range(2)]
    return replace(plan, faults=tuple(faults))


def _by_other_majorities(rng: random.Random, plan: Plan) -> Plan:
    """One of three nodes misses a lock and another one forgets it; the next client cannot reach the third."""
    times = ((0.0, 0, FIRST), (5.0, 0, 2), (9.0, 1, 3), (13.0 + rng.uniform(0, 1), 1, 5))
    uses = tuple(Use(at, program, 0, "a", number, None if at else 0.0, 0.3) for at, program, number in times)
    missed, forgotten = Fault(4.0, "server restarted", 2, 2.0), Fault(6.5, "server restarted empty", 0, 0.1)
    faults = (missed, forgotten, Fault(8.0, "cut", 1, 12.0))
    return replace(plan, workers=2, concurrency=1, ttl=3.0, uses=uses, faults=faults)


def _at_two_workers(_: random.Random, plan: Plan) -> Plan:
    return replace(plan, workers=2)


def _delivered_again(rng: random.Random, plan: Plan) -> Plan:
    plan = _with(rng, plan, kinds=["acknowledgement lost"] * 2)
    return replace(plan, visibility=2 * plan.ttl)


def _paused(rng: random.Random, plan: Plan) -> Plan:
    return _with(rng, plan, kinds=[rng.choice(("worker stopped", "host suspended"))], seconds=2 * plan.ttl)


def _held_back_for_long(rng: random.Random, plan: Plan) -> Plan:
    asked: Message | Use = rng.choice((*plan.messages, *plan.uses))
    late = Fault(round(asked.at, 4), "requests held back", rng.randrange(100), round(rng.uniform(70.0, 90.0), 3))
    return replace(plan, faults=tuple(sorted((*plan.faults, late), key=lambda fault: fault.at)))


def _held_to_the_end(_: random.Random, plan: Plan) -> Plan:
    """Leases that are not renewed, and are held beyond their end."""
    uses = [
        replace(use, takes=1.2 * plan.ttl, ways=("fixed",)) if use.number % 2 else replace(use, patience=None)
        for use in plan.uses
    ]
    return replace(plan, uses=tuple(uses))


def _one_has_a_server_of_its_own(world: Any) -> None:
    other = Server(world.run, world.network, world.host("other"))
    world.settings_of["host0"] = {"singleton_lock_backend": f"redis://{other.host.name}:6379/0"}


def _saved_before(world: Any) -> None:
    for fault in world.plan.faults:
        if fault.kind == "server restarted with older data":
            server = world.servers[fault.target % len(world.servers)]
            world.run.at(max(fault.at - 2.0, 0.0), server.save)


def _set(**settings: Any) -> Callable[[Any], None]:
    return lambda world: world.settings.update(settings)


def _of_hosts(**attributes: Any) -> Callable[[Any], None]:
    """Set attributes of hosts that are made from now on, which are the clients' hosts."""
    return lambda world: vars(world).update(attributes)


def _no_excuse(world: Any) -> None:
    world.bodies.excuses = False


def _two_ttls(world: Any) -> None:
    world.ttls = (world.plan.ttl, 0.5)


ASSUMPTIONS = (
    Assumption(
        "one server",
        "one worker locks on another server",
        plan=_at_two_workers,
        world=_one_has_a_server_of_its_own,
    ),
    Assumption("no flush", "the server forgets everything", plan=partial(_with, kinds=["server restarted empty"])),
    Assumption("no eviction", "the server evicts a key now and then", plan=partial(_with, kinds=["key evicted"] * 8)),
    Assumption(
        "no fail-over that forgets",
        "the server comes back without the writes of two seconds",
        plan=partial(_with, kinds=["server restarted with older data"]),
        world=_saved_before,
    ),
    Assumption(
        "no vote after amnesia",
        "a node of a Redlock that came back empty votes at once",
        nodes=3,
        plan=partial(_on_two_nodes, kind="server restarted empty"),
        world=_set(singleton_lock_transport_options={"restart_delay": False}),
    ),
    Assumption(
        "all of a node's data, or none",
        "nodes of a Redlock come back without the writes of two seconds",
        nodes=3,
        plan=partial(_on_two_nodes, kind="server restarted with older data"),
        world=_saved_before,
    ),
    Assumption(
        "one ttl on a Redlock",
        "some ask with a shorter ttl than the holder's, and nodes come back empty",
        kind="locks",
        nodes=3,
        plan=_asked_for_beside,
        world=_two_ttls,
    ),
    Assumption(
        "records outlive copies",
        "a finished message is remembered for a second, and copies come later",
        shows=r"runs again after its success",
        plan=_delivered_again,
        world=_set(singleton_lock_done_ttl=1.0),
    ),
    Assumption(
        "the server's clock",
        "a server forgets everything, and its clock is set back by an hour",
        shows=r"fence \d+ (after|is given out twice)",
        plan=partial(_with, kinds=["server restarted empty and behind"]),
    ),
    Assumption(
        "clients' clocks on a Redlock",
        "a node forgets, and the clocks of clients differ by an hour",
        shows=r"fence \d+ (after|is given out twice)",
        kind="locks",
        nodes=3,
        plan=_by_other_majorities,
        world=_of_hosts(walls=(-3600.0, 3600.0)),
    ),
    Assumption(
        "hosts have names",
        "two hosts have one name and one id of their boot",
        plan=_at_two_workers,
        world=_of_hosts(identity="twin"),
    ),
    Assumption(
        "nothing arrives after a minute",
        "a request arrives seventy seconds after it was given up",
        shows="nobody uses it",
        kind="locks",
        plan=_held_back_for_long,
    ),
    Assumption(
        "clocks within 1 %",
        "the clocks of some clients are 5 % slow",
        kind="locks",
        plan=_held_to_the_end,
        world=_of_hosts(rates=(0.945, 1.0)),
    ),
    Assumption(
        "no pause",
        "a worker is stopped for longer than its lease (not promised)",
        plan=_paused,
        world=_no_excuse,
    ),
)

BY_NAME = {assumption.name: assumption for assumption in ASSUMPTIONS}
