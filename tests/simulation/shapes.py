"""Plans in which rare events meet: drawn at random, but with the times and lengths that decide protocols.

A lock that ends in the millisecond in which its waiter leaves, an answer that takes nearly as long as the lease, a host
that sleeps right after it got a lock: each is drawn often enough here that it can meet another rare event.
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.plan import Fault, Message, Plan, Shape, Use, one_of

#: Share of the plans of a kind that have such a shape.
SHARE = 0.5

#: Seconds after which a client that asked in vain has given up: three tries of a second each, and pauses.
UNANSWERED = 3.3


def shaped(plan: Plan) -> Plan:
    """The plan, or another plan instead; its seed decides."""
    rng = random.Random(f"shape of {plan.seed}")
    shapes = BY_KIND.get(plan.kind, ())
    if not shapes or rng.random() >= SHARE:
        return plan
    return one_of(shapes, plan, rng)


# Tasks


def slow_everywhere(plan: Plan, rng: random.Random) -> Plan:
    """Each network message takes as long as a short body: copies are refused, begin and end while others ask."""
    task = rng.choice(("shop.late", "shop.late", "shop.refuses", "shop.again", "shop.retries", "shop.keeps"))
    latency = round(rng.choice((0.004, 0.02)) * plan.ttl, 4)
    many = rng.randint(2, 4)
    at = [round(rng.uniform(0.05, 0.05 + 4 * latency), 4) for _ in range(many)]
    takes = (0.0, 0.05, 0.2, latency, 2 * latency)
    words = [f"takes={rng.choice(takes):g}" for _ in range(many)]
    if task == "shop.refuses":
        words[0] = f"takes={round(3.0 + rng.uniform(-2, 4) * latency, 3):g}"
    if task in ("shop.retries", "shop.keeps"):
        words = [f"{word} retries=1 countdown={rng.choice((0, 0, 0.3))}" for word in words]
    messages = tuple(Message(at[number], task, "a", number, words[number]) for number in range(many))
    again = [
        Fault(round(max(at) + rng.uniform(0, 6) * latency, 4), "delivered again", rng.randrange(100)) for _ in "123"
    ]
    lost = [Fault(0.05, "acknowledgement lost") for _ in range(rng.randrange(3))]
    return replace(
        plan, nodes=1, messages=messages, faults=_in_order(*again, *lost), latency=latency, workers=rng.choice((2, 3))
    )


def asleep(plan: Plan, rng: random.Random) -> Plan:
    """A host sleeps, or a process is stopped, for about the length of its lease, soon after it got the lease."""
    ttl, latency = plan.ttl, round(rng.choice((0.0, 0.02)) * plan.ttl, 4)
    checks = " checks=1" if rng.random() < 0.6 else ""
    messages = tuple(
        Message(
            round(0.1 + 0.3 * number, 3), task, "a", number, f"takes={round(rng.uniform(0.3, 2) * ttl, 2):g}{checks}"
        )
        for number, task in enumerate(rng.choices(("shop.late", "shop.again", "shop.again"), k=rng.randint(1, 2)))
    )
    faults = [
        Fault(
            round(0.1 + rng.uniform(0.01, 1.0) * rng.choice((0.5, ttl)), 3),
            rng.choice(("host suspended", "host suspended", "worker stopped")),
            number,
            round(rng.uniform(0.7, 1.2) * ttl + rng.choice((0.0, 0.5 * ttl, 2.5)), 3),
        )
        for number in range(2)
    ]
    if rng.random() < 0.5:
        faults.append(Fault(round(rng.uniform(0.2, 1.0) * ttl, 3), "delivered again", rng.randrange(100)))
    return replace(
        plan, nodes=1, messages=messages, faults=_in_order(*faults), latency=latency, workers=2, visibility=60.0
    )


def asleep_after_a_renewal(plan: Plan, rng: random.Random) -> Plan:
    """A host sleeps soon after an answer that took nearly as long as is waited for: the lease ends meanwhile."""
    ttl = plan.ttl
    message = Message(0.1, rng.choice(("shop.late", "shop.again")), "a", 0, f"takes={2 * ttl:g}")
    sleeps = Fault(
        round(0.1 + ttl / 3 * (rng.randint(1, 3) + rng.uniform(0.0, 0.7)), 3), "host suspended", 0,
        round(rng.uniform(1.0, 1.5) * ttl, 3),
    )  # fmt: skip
    latency = round(rng.choice((0.025, 0.04)) * ttl, 4)
    return replace(plan, nodes=1, messages=(message,), faults=(sleeps,), latency=latency, workers=1, visibility=60.0)


def last_breath(plan: Plan, rng: random.Random) -> Plan:
    """A child dies while its request is still on the way to the server."""
    latency = round(rng.choice((0.02, 0.04)) * plan.ttl, 4)
    messages = tuple(
        Message(
            round(0.1 + number * rng.choice((0.0, 0.5)), 3),
            rng.choice(("shop.late", "shop.again")),
            "a",
            number,
            "takes=0.3",
        )
        for number in range(rng.randint(1, 3))
    )
    kills = (
        Fault(round(message.at + 0.004 + rng.uniform(0, 4) * latency, 4), "child killed", rng.randrange(100))
        for message in messages
    )
    return replace(
        plan,
        nodes=1,
        pool="prefork",
        messages=messages,
        faults=_in_order(*kills),
        latency=latency,
        workers=rng.choice((1, 2)),
    )


def silent_at_an_end(plan: Plan, rng: random.Random) -> Plan:
    """When a body ends, its host cannot reach the lock server, or gets no answers; copies come meanwhile."""
    ttl = plan.ttl
    task = rng.choice(("shop.late", "shop.again", "shop.retries", "shop.keeps", "shop.rests"))
    words = f"takes={round(rng.uniform(0, 0.5) * ttl, 2):g}"
    words += f" retries=1 countdown={rng.choice((0, 0.3))}" if task in ("shop.retries", "shop.keeps") else ""
    messages = tuple(
        Message(round(0.1 + 0.2 * number, 3), task, "a", number, words) for number in range(rng.randint(1, 3))
    )
    kind = rng.choice(("cut at an end", "cut there at an end", "cut back at an end"))
    # Perhaps as long as it takes until a copy reports the end once more.
    seconds = round(rng.choice((rng.uniform(0.3, 3.0), rng.uniform(0.5, 2.0) * ttl, rng.uniform(11.5, 16.0))), 3)
    faults = [Fault(0.05, kind, 0, seconds)]
    faults += [Fault(round(rng.uniform(0.2, 2.0) * ttl, 3), "delivered again", rng.randrange(100)) for _ in "12"]
    return replace(
        plan, nodes=1, messages=messages, faults=_in_order(*faults), workers=rng.choice((2, 3)), forgets=seconds > 11
    )


def kept_for_the_dead(plan: Plan, rng: random.Random) -> Plan:
    """The end of an attempt arrives late; the next attempt, which comes before, dies or is revoked while it waits."""
    if rng.random() < 0.5:
        task, countdown, seconds = rng.choice(("shop.keeps", "shop.keeps_early")), 1.5, rng.uniform(1.7, 3.5)
        ended = Fault(round(rng.uniform(0.45, 1.8), 3), "revoked")
    else:
        task, countdown, seconds = "shop.keeps_early", rng.choice((0, 0.3)), rng.uniform(1.5, 4.0)
        ended = Fault(round(rng.uniform(0.5, 2.0), 3), "child killed", rng.randrange(100))
    words = f"takes={rng.choice((0.1, 0.3))} retries=1 countdown={countdown}"
    silent = Fault(0.05, rng.choice(("cut there at an end", "cut at an end")), 0, round(seconds, 3))
    return replace(
        plan, nodes=1, pool="prefork", messages=(Message(0.1, task, "a", 0, words),), faults=(silent, ended),
        workers=2, concurrency=rng.choice((1, 2)), in_turns=True,
    )  # fmt: skip


def ends_differently(plan: Plan, rng: random.Random) -> Plan:
    """No lock server hears of an end in time, so a copy runs, and ends in another way; its end is told slowly."""
    message = Message(0.1, rng.choice(("shop.late", "shop.again")), "a", 0, "takes=0.3 fails_once=1")
    again = (Fault(at, "delivered again", rng.randrange(100)) for at in (0.2, 0.3))
    silent = Fault(0.05, rng.choice(("cut at an end", "cut there at an end")), 0, round(rng.uniform(4.0, 9.0), 3))
    slow = Fault(round(rng.uniform(3.8, 5.0), 3), "results slow", 0, round(rng.uniform(1.0, 4.5), 3))
    return replace(
        plan,
        nodes=1,
        messages=(message,),
        faults=_in_order(*again, silent, slow),
        workers=2,
        ttl=3.0,
        visibility=60.0,
        in_turns=True,
    )


def asks_and_dies(plan: Plan, rng: random.Random) -> Plan:
    """A child dies while it asks, and its request arrives much later; its message waits behind others by then."""
    asks, ttl = 0.6, rng.choice((6.0, 10.0))
    # On a new connection, only the greeting would be held back.
    first = Message(0.1, "shop.again", "a", 0, "takes=0.05")
    dies = Message(asks, rng.choice(("shop.late", "shop.again", "shop.retries")), "b", 1, "takes=0.3")
    others = (Message(asks + 0.01, "shop.again", key, 2 + "ac".index(key), f"takes={ttl:g}") for key in "ac")
    late = Fault(asks, "requests held back", 10 * rng.randrange(2), round(rng.uniform(1.0, 10.0), 3))
    killed = Fault(round(asks + rng.uniform(0.01, 1.0), 3), "child killed", rng.randrange(100))
    return replace(
        plan, nodes=1, pool="prefork", messages=(first, dies, *others), faults=(late, killed), workers=1,
        concurrency=1, ttl=ttl,
    )  # fmt: skip


def given_up_by_one(plan: Plan, rng: random.Random) -> Plan:
    """A worker asks for a lock and hears nothing, nor can it take that back; another worker gets its message."""
    # New connections would only be greeted.
    first = (Message(0.1, "shop.again", key, number, "takes=0.05") for number, key in enumerate("ab"))
    rest = (
        Message(round(0.6 + rng.uniform(0.0, 0.2), 3), rng.choice(("shop.late", "shop.again", "shop.two")), key, number,
                f"takes={rng.choice((0.1, 1.0))}")
        for number, key in enumerate("cd", 2)
    )  # fmt: skip
    deaf, mute, over = rng.uniform(0.58, 0.7), rng.uniform(0.8, 4.0), 0.8 + UNANSWERED + rng.uniform(1.0, 5.0)
    worker = rng.randrange(2)
    faults = (
        Fault(round(at, 3), kind, worker, round(over - at, 3)) for at, kind in ((deaf, "cut back"), (mute, "cut"))
    )
    return replace(
        plan, nodes=1, messages=(*first, *rest), faults=(*faults,), workers=2, concurrency=1, ttl=10.0, in_turns=True
    )


def silent_and_deaf(plan: Plan, rng: random.Random) -> Plan:
    """Neither the lock server nor the broker answers a worker that asks for a lock, or puts its message back."""
    messages = tuple(
        Message(round(0.1 + 0.1 * number, 3), rng.choice(("shop.late", "shop.again", "shop.patient")), "a", number,
                f"takes={round(rng.uniform(0.1, 1.5) * plan.ttl, 2):g}")
        for number in range(rng.randint(1, 3))
    )  # fmt: skip
    silent = rng.choice(("cut", "cut there", "cut back", "server stalled"))
    seconds = round(UNANSWERED + rng.uniform(0.0, 3.0), 3)
    faults = (
        Fault(0.05, silent, rng.randrange(100), seconds),
        Fault(0.06, "broker deaf", 0, round(UNANSWERED + rng.uniform(0.5, 4.0), 3)),
    )
    return replace(plan, nodes=1, messages=messages, faults=faults, workers=2)


def one_host(plan: Plan, rng: random.Random) -> Plan:
    """All workers are on one host, and one of them dies with its locks."""
    tasks = rng.choice((("shop.patient",), ("shop.refuses",), ("shop.again",)))
    messages = tuple(
        Message(round(rng.uniform(0.05, 2.0), 3), rng.choice(tasks), "a", number,
                f"takes={round(rng.uniform(0.3, 1.5) * plan.ttl, 2):g}")
        for number in range(rng.randint(2, 4))
    )  # fmt: skip
    faults = (
        Fault(
            round(rng.uniform(0.3, 2.5), 3), "worker killed", rng.randrange(100), round(rng.uniform(1, 2) * plan.ttl, 2)
        ),
    )
    return replace(plan, nodes=1, messages=messages, faults=faults, workers=rng.choice((2, 3)), on_one_host=True)


def slow_results(plan: Plan, rng: random.Random) -> Plan:
    """The result backend is slow, and meanwhile a copy comes or the process dies."""
    task = rng.choice(("shop.late", "shop.again"))
    messages = tuple(
        Message(round(0.1 + 0.5 * number, 3), task, rng.choice("ab"), number, "takes=0.1", chained=rng.random() < 0.7)
        for number in range(rng.randint(1, 2))
    )
    faults = [Fault(0.05, "results slow", 0, round(rng.uniform(2.0, 4.5), 3))]
    faults += [Fault(round(rng.uniform(0.2, 3.0), 3), "delivered again", rng.randrange(100)) for _ in "12"]
    if rng.random() < 0.5:
        faults.append(Fault(round(rng.uniform(1.0, 4.0), 3), rng.choice(("child killed", "worker killed")), 0, 0.5))
    return replace(plan, nodes=1, messages=messages, faults=_in_order(*faults), workers=2)


def ended_in_order(plan: Plan, rng: random.Random) -> Plan:
    """SIGTERM ends a child in the middle of its body."""
    messages = tuple(
        Message(round(0.1 + 0.2 * number, 3), rng.choice(("shop.late", "shop.again")), "a", number,
                f"takes={round(rng.uniform(0.3, 2.0), 2):g}")
        for number in range(rng.randint(1, 3))
    )  # fmt: skip
    faults = (Fault(round(rng.uniform(0.2, 1.5), 3), "child killed by SIGTERM", rng.randrange(100)) for _ in "12")
    return replace(plan, pool="prefork", messages=messages, faults=_in_order(*faults))


#: Faults for messages in line, with their longest durations in seconds.
OF_LINES = {
    "worker ended": 1.0,
    "worker killed": 1.0,
    "worker stopped": 5.0,
    "child killed": 0.0,
    "broker cut": 2.0,
    "wake-ups lost": 12.0,
    "woken in vain": 0.0,
    "connections closed": 0.0,
    "delivered again": 0.0,
    "slow": 3.0,
    "server stalled": 2.0,
}


def in_line(plan: Plan, rng: random.Random) -> Plan:
    """Copies wait for a lock in main processes, which end or die, lose their broker, or miss that the lock is free."""
    task = rng.choice(("shop.again", "shop.again", "shop.two", "shop.retries", "shop.rests"))
    again = " retries=1 countdown=0" if task == "shop.retries" else ""
    longest, keys = rng.choice((0.5, 2.0, 2.0 * plan.ttl)), rng.choice(("a", "aaab", "aabc"))
    many = rng.randint(3, 7)
    messages = tuple(
        Message(
            round(0.05 + rng.choice((0.1, 0.6, 1.3)) * number, 3), task, rng.choice(keys), number,
            f"takes={round(rng.uniform(0.05, longest), 2):g}{again}",
        )
        for number in range(many)
    )  # fmt: skip
    kinds = rng.choices([*OF_LINES, "broker cut", "worker ended"], k=rng.choice((0, 0, 1, 1, 2, 3)))
    faults = (
        Fault(
            round(rng.uniform(0.1, 0.5 + many * longest / 2), 3), kind, rng.randrange(100),
            round(rng.uniform(0.0, OF_LINES[kind]), 3),
        )
        for kind in kinds
    )  # fmt: skip
    return replace(plan, nodes=1, messages=messages, faults=_in_order(*faults), workers=rng.choice((1, 2, 3)))


# Locks outside of tasks


def kept_for_its_time(plan: Plan, rng: random.Random) -> Plan:
    """Locks without renewals are held longer than they last, and answers take long."""
    ttl = rng.choice((1.0, 1.0, 3.0))
    longest = rng.choice((0.02, 0.2, 0.3))
    ways = ("fixed", "checks") if rng.random() < 0.5 else ("fixed",)
    uses = tuple(
        Use(
            round(rng.uniform(0.05, 0.5), 3),
            number % 2,
            0,
            "a",
            number,
            None,
            round(rng.uniform(0.8, 1.3) * ttl, 2),
            ways,
        )
        for number in range(rng.randint(1, 3))
    )
    slow = (Fault(0.01, "slow", 0, ttl),) if longest == 0.3 else ()
    latency = longest * ttl if longest == 0.02 else 0.5 * longest * ttl if longest == 0.2 else 0.0
    return _of_locks(plan, uses, slow, ttl=ttl, latency=round(latency, 4))


def leaves_as_it_is_freed(plan: Plan, rng: random.Random) -> Plan:
    """A wait ends at the very moment in which its waiter would get the lock; others wait behind it."""
    name = rng.choice("ab")
    takes = rng.choice((0.3, 0.5, 0.9))
    uses = [Use(0.1, 0, 0, name, 0, None, takes)]
    for number in range(1, rng.randint(3, 5)):
        at = round(0.12 + 0.02 * number, 3)
        ends = 0.1 + takes + rng.uniform(0.0, 0.012) - at
        patience = round(ends, 4) if number % 2 or rng.random() < 0.5 else None
        uses.append(Use(at, number % 2, number % 3, name, number, patience, rng.choice((0.0, 0.1, 0.3))))
    limits = (("a", 1), ("b", rng.choice((1, 2))))
    return _of_locks(plan, tuple(uses), (), limits=limits, latency=rng.choice((0.0, 0.0, 0.004)))


def given_up(plan: Plan, rng: random.Random) -> Plan:
    """A request is held back on its way until long after it was given up or repeated."""
    asks = round(rng.uniform(0.3, 0.6), 3)
    patience = rng.choice((0.0, None, 1.0, 8.0))
    # On a new connection, only the greeting would be held back.
    first = Use(0.05, 0, 0, "a", 9, None, 0.0)
    uses = (
        Use(asks, 0, 0, "a", 0, patience, rng.choice((0.0, 0.3, 1.0))),
        Use(round(asks + rng.uniform(0.5, 6.0), 3), 1, 0, "a", 1, rng.choice((None, 2.0)), rng.choice((0.1, 1.0))),
    )[: rng.randint(1, 2)]
    held_back = Fault(
        round(asks - rng.uniform(0.0, 0.003), 4),
        "requests held back",
        10 * rng.randrange(4),
        round(rng.uniform(4.5, 9), 3),
    )
    return _of_locks(plan, (first, *uses), (held_back,), ttl=rng.choice((6.0, 10.0)))


def slots_over_slow_ways(plan: Plan, rng: random.Random) -> Plan:
    """A semaphore is taken and given back while its waiters ask again."""
    latency = rng.choice((0.02, 0.05, 0.1))
    uses = tuple(
        Use(
            round(0.1 + rng.uniform(0, 0.3), 3), number % 2, number // 2, "b", number,
            rng.choice((None, round(rng.uniform(0.5, 3.0), 2))),
            round(rng.choice((0.9, 1.0, rng.uniform(0.3, 3.0))), 2),
        )
        for number in range(rng.randint(4, 6))
    )  # fmt: skip
    return _of_locks(
        plan, uses, (), ttl=rng.choice((6.0, 10.0)), latency=latency, limits=(("a", 1), ("b", rng.choice((1, 2, 2))))
    )


def slot_ends_as_another_is_freed(plan: Plan, rng: random.Random) -> Plan:
    """A waiter finds an expired slot when it is woken for another slot."""
    ends = round(6.0 + rng.uniform(-0.05, 0.25), 3)
    uses = (
        Use(0.1, 0, 0, "b", 0, None, 6.6, ("fixed",)),
        Use(0.1, 1, 0, "b", 1, None, ends),
        Use(round(rng.uniform(1.0, 3.0), 3), rng.randrange(2), 1, "b", 2, None, 3.0),
    )
    return _of_locks(plan, uses, (), latency=rng.choice((0.05, 0.1)), limits=(("a", 1), ("b", 2)))


def asks_in_silence(plan: Plan, rng: random.Random) -> Plan:
    """A holder asks for more time, or for less, while the server is silent."""
    asks = 0.1 + 2.0 + rng.uniform(-0.15, 0.05)
    use = Use(0.1, 0, 0, "a", 0, None, 4.0, (rng.choice(("reacquire", "extend", "shorten")),))
    silent = (
        Fault(round(asks - 0.01, 4), "connections closed", 0),
        Fault(round(asks, 4), rng.choice(("cut", "cut back", "cut there")), 0, round(rng.uniform(0.5, 4.0), 3)),
    )
    return _of_locks(plan, (use,), silent[rng.randrange(2) :], ttl=rng.choice((1.0, 3.0)))


def answers_lost(plan: Plan, rng: random.Random) -> Plan:
    """The server is silent for some seconds when a lock is asked for."""
    asks = round(rng.uniform(0.1, 0.5), 3)
    uses = (
        Use(asks, 0, 0, "a", 0, rng.choice((0.0, 0.0, None, 2.0)), rng.choice((0.1, 1.0))),
        Use(round(asks + rng.uniform(1.0, 9.0), 3), 1, 0, "a", 1, rng.choice((None, 5.0)), 0.1),
    )
    for_seconds = rng.choice((rng.uniform(0.3, 1.5), rng.uniform(UNANSWERED, 6.0)))
    silent = Fault(
        round(asks + rng.uniform(0.0, 0.005), 4),
        rng.choice(("cut back", "cut back", "cut")),
        0,
        round(for_seconds, 3),
    )
    return _of_locks(plan, uses, (silent,), ttl=10.0)


def woken_and_frozen(plan: Plan, rng: random.Random) -> Plan:
    """The next holder does not notice that it got the lock, for longer than it may keep the others waiting."""
    takes = rng.choice((0.7, 0.9))
    uses = (
        Use(0.1, 0, 0, "a", 0, None, takes),
        Use(0.2, 1, 0, "a", 1, None, 0.2),
        Use(0.25, 2, 0, "a", 2, None, 0.2),
    )
    stopped = Fault(
        round(0.1 + takes - rng.uniform(0.0, 0.5), 3), "worker stopped", 1, round(rng.uniform(1.0, 2.0) * plan.ttl, 3)
    )
    return replace(_of_locks(plan, uses, (stopped,)), workers=3)


# Beats


def killed_as_it_sends(plan: Plan, rng: random.Random) -> Plan:
    """A beat dies after it has sent a tick, before the tick is recorded."""
    kills = tuple(
        Fault(round(rng.uniform(0.5, 2.0) * plan.ttl, 3), "beat killed as it sends", 0, round(rng.uniform(0, 0.5), 3))
        for _ in range(rng.randint(1, 2))
    )
    return replace(plan, faults=_in_order(*kills), workers=rng.choice((1, 2, 2)))


BY_KIND: dict[str, tuple[Shape, ...]] = {
    "tasks": (
        *(slow_everywhere, slow_everywhere, asleep, asleep, silent_at_an_end, silent_and_deaf),
        *(one_host, slow_results, ended_in_order, kept_for_the_dead, last_breath, ends_differently, asks_and_dies),
        *(given_up_by_one, asleep_after_a_renewal),
    ),
    "locks": (
        *(kept_for_its_time, leaves_as_it_is_freed, given_up, slots_over_slow_ways, slot_ends_as_another_is_freed),
        *(leaves_as_it_is_freed, answers_lost, asks_in_silence, woken_and_frozen),
    ),
    "beats": (killed_as_it_sends,),
}


def _of_locks(
    plan: Plan,
    uses: tuple[Use, ...],
    faults: tuple[Fault, ...],
    *,
    ttl: float = 6.0,
    latency: float = 0.0,
    limits: tuple[tuple[str, int], ...] = (("a", 1), ("b", 1)),
) -> Plan:
    return replace(
        plan, nodes=1, workers=2, uses=uses, faults=faults, ttl=ttl, latency=latency, limits=limits, concurrency=3
    )


def _in_order(*faults: Fault) -> tuple[Fault, ...]:
    return tuple(sorted(faults, key=lambda fault: fault.at))
