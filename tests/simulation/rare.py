"""More shapes, which few plans have: instead of the plan that their seed has otherwise, so that other seeds stay."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tests.simulation.plan import Fault, Message, Plan

Shape = Callable[[Plan, random.Random], Plan]

#: By kind of plan, the share that has such a shape.
SHARES = {"beats": 0.3, "tasks": 0.2, "sent": 0.1}


def perhaps_rare(plan: Plan) -> Plan:
    """The plan, or another plan instead; its seed decides."""
    rng = random.Random(f"rare of {plan.seed}")
    return rng.choice(BY_KIND[plan.kind])(plan, rng) if rng.random() < SHARES.get(plan.kind, 0.0) else plan


def race_for_ticks(plan: Plan, rng: random.Random) -> Plan:
    """Several beats claim each tick at about the same time: claims alone decide, which these faults do not touch."""
    latency = rng.choice((0.01, 0.03, 0.06))
    entries = tuple((f"entry{number}", rng.choice((1.0, 1.0, 2.0))) for number in range(rng.randint(1, 3)))
    kinds = ("slow", "connections closed", "worker killed", "beat ended", "beat killed as it sends", "cut back")
    faults = (
        Fault(round(rng.uniform(0.5, 6.0), 3), rng.choice(kinds), rng.randrange(100), round(rng.uniform(0.0, 2.0), 3))
        for _ in range(rng.randrange(4))
    )
    plan = replace(plan, nodes=1, workers=rng.choice((2, 3)), mode="shared", entries=entries, latency=latency)
    return replace(plan, faults=tuple(sorted(faults, key=lambda fault: fault.at)))


def stubborn(plan: Plan, rng: random.Random) -> Plan:
    """A body goes on although it is interrupted, and loses its lock: it is interrupted again, or killed on prefork."""
    pool, ttl = rng.choice(("prefork", "threads")), rng.choice((6.0, 10.0))
    ignores = 1 if pool == "threads" else rng.choice((1, 9))
    tasks = ("shop.late", "shop.again", "shop.two", "shop.keeps")
    messages = tuple(
        Message(round(0.1 + 0.3 * number, 3), task, "a", number, f"takes={2 * ttl:g} stubborn={ignores}")
        for number, task in enumerate(rng.choices(tasks, k=rng.randint(1, 3)))
    )
    faults = [Fault(round(rng.uniform(0.5, ttl), 3), rng.choice(("cut", "cut back", "server stalled")), 0, 1.5 * ttl)]
    if ignores > 1:
        faults.insert(0, Fault(0.05, "child killed"))  # Before there is any message: as what follows may be.
    plan = replace(plan, nodes=1, pool=pool, ttl=ttl, messages=messages, faults=tuple(faults), visibility=60.0)
    return replace(plan, workers=rng.choice((1, 2)), concurrency=2)


def bounded(plan: Plan, rng: random.Random) -> Plan:
    """Messages that may meet two conflicts wait behind a long one, and are delivered again or lose their worker."""
    longest = rng.choice((2.0, 6.0, 12.0))
    messages = tuple(
        Message(
            round(0.1 + 0.2 * number, 3),
            "shop.bounded",
            rng.choice("aab"),
            number,
            f"takes={longest if number < 2 else 0.2}",
        )
        for number in range(rng.randint(2, 5))
    )
    kinds = ("delivered again", "worker killed", "broker cut", "child killed")
    faults = sorted(
        (round(rng.uniform(0.2, 6.0), 3), rng.choice(kinds), rng.randrange(99), 0.5) for _ in range(rng.randrange(3))
    )
    plan = replace(plan, nodes=1, messages=messages, faults=tuple(Fault(*fault) for fault in faults))
    return replace(plan, workers=rng.choice((1, 2)), concurrency=2, visibility=60.0)


def expires_in_line(plan: Plan, rng: random.Random) -> Plan:
    """Copies wait for a lock for longer than they may, in a worker that has room, or are delivered again there."""
    expires = rng.choice((1.5, 4.0))
    times = (0.1, 0.4, round(rng.uniform(5.0, 9.0), 3))
    messages = tuple(
        Message(at, "shop.behind", "a", number, f"takes={rng.choice((0.2, 3.0, 5.0))}", sent=f"expires={expires}")
        for number, at in enumerate(times)
    )
    faults = (Fault(at, "delivered again", rng.randrange(9)) for at in (0.6, 1.2)[: rng.randrange(3)])
    plan = replace(plan, nodes=1, messages=messages, faults=tuple(faults), concurrency=2, visibility=60.0)
    return replace(plan, workers=rng.choice((1, 2)), queue_ttl=None)


BY_KIND: dict[str, tuple[Shape, ...]] = {
    "beats": (race_for_ticks,),
    "tasks": (stubborn, bounded),
    "sent": (expires_in_line,),
}
