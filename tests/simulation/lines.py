"""Plans of copies that wait in line in main processes: which locks they wait for, and what becomes of the processes."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.plan import Fault, Message, Plan, Shape, one_of
from tests.simulation.shapes import in_line


def lined_up(plan: Plan, rng: random.Random) -> Plan:
    """The plan with other messages and faults, of copies in line."""
    return one_of(SHAPES, plan, rng, by=random.Random(f"shape in line of {plan.seed}"))


def elsewhere_by_now(plan: Plan, rng: random.Random) -> Plan:
    """A process is without its broker when a lock is freed: the copies that it had are in another process by then."""
    task, takes = rng.choice(("shop.again", "shop.again", "shop.rests")), round(rng.uniform(1.0, 2.5), 2)
    many = rng.randint(2, 4)
    messages = tuple(
        Message(round(0.05 + 0.1 * number, 3), task, "a", number, f"takes={0.3 if number else takes:g}")
        for number in range(many)
    )
    begins = round(takes - rng.uniform(0.1, 0.8), 3)
    cut = Fault(begins, "broker cut", rng.randrange(100), round(rng.uniform(1.0, 2.0), 3))
    return replace(
        plan, nodes=1, messages=messages, faults=(cut,), workers=2, concurrency=2, visibility=60.0, forgets=False
    )


def always_another(plan: Plan, rng: random.Random) -> Plan:
    """A process blocks anew all the time, since there is always another lock to block for; meanwhile a lock ends
    that nobody is notified of.
    """
    busy = round(rng.uniform(0.8, 1.3), 2)
    others = (Message(round(0.06 + 0.02 * number, 3), "shop.again", "b", 2 + number, f"takes={busy:g}")
              for number in range(7))  # fmt: skip
    rests = (Message(round(0.05 + 0.1 * number, 3), "shop.rests", "a", number, "takes=0.1") for number in range(2))
    return replace(
        plan, nodes=1, messages=(*rests, *others), faults=(), workers=1, concurrency=2, visibility=60.0, forgets=False
    )


def busy_elsewhere(plan: Plan, rng: random.Random) -> Plan:
    """A process is busy with long tasks of other locks when a lock is freed that copies in both processes wait for. The
    first copy is in the busy process, as a rule, and the other one has room.
    """
    task, takes, long = rng.choice(("shop.again", "shop.again", "shop.rests")), rng.uniform(1.2, 2.0), 4.0
    # In turn: a copy that is put back takes a turn, too.
    calls = [("a", takes), ("b", long), ("a", 0.1), ("d", 0.1), ("a", 0.1), ("c", long)]
    calls += [("a", 0.1)] * rng.randint(0, 2)
    if rng.random() < 0.3:
        rng.shuffle(calls)
    messages = tuple(
        Message(round(0.05 + 0.12 * number, 3), task, key, number, f"takes={seconds:.2f}")
        for number, (key, seconds) in enumerate(calls)
    )
    return replace(
        plan, nodes=1, messages=messages, faults=(), workers=2, concurrency=2, visibility=60.0, in_turns=True
    )


SHAPES: tuple[Shape, ...] = (
    *(in_line, in_line, in_line, in_line, in_line, in_line, elsewhere_by_now, always_another, busy_elsewhere),
)
