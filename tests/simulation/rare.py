"""More shapes, which few plans have: instead of the plan that their seed has otherwise, so that other seeds stay."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.clusters import a_slot_moves
from tests.simulation.plan import Fault, Message, Plan, Shape, one_of

#: By kind of plan, the share that has such a shape.
SHARES = {"beats": 0.3, "joined": 0.2, "sent": 0.1, "tasks": 0.2}

#: The share of the plans with tasks, of whatever shape, whose lock server is a cluster instead.
OF_CLUSTER = 0.05


def perhaps_rare(plan: Plan) -> Plan:
    """The plan, or another plan instead; its seed decides."""
    rng, of_cluster = random.Random(f"rare of {plan.seed}"), random.Random(f"cluster of {plan.seed}")
    plan = one_of(BY_KIND[plan.kind], plan, rng) if rng.random() < SHARES.get(plan.kind, 0.0) else plan
    is_cluster = plan.kind == "tasks" and of_cluster.random() < OF_CLUSTER
    return one_of((a_slot_moves,), plan, of_cluster) if is_cluster else plan


def dies_in_its_retry(plan: Plan, rng: random.Random) -> Plan:
    """The holder retries, and dies then; some have joined its first attempt, and others the one in which it dies. If
    each message to the lock server takes long, one of them may get the lock between the two.
    """
    task = rng.choice(("shop.joins", "shop.joins", "shop.joins_keeps", "shop.joins_early"))
    takes, countdown, latency = 1.2, rng.choice((0.3, 1.0)), rng.choice((0.0, 0.02, 0.02)) * plan.ttl
    begins = 0.05 + takes + countdown + 10 * latency
    first = Message(0.05, task, "a", 0, f"takes={takes} retries=1 countdown={countdown}")
    times = [rng.uniform(0.2, 0.5) for _ in "1234"] + [begins + rng.uniform(0.2, 0.5) * takes for _ in "12"]
    if task == "shop.joins_keeps":
        times.append(0.05 + takes + rng.uniform(0.2, 0.9) * countdown)
    rest = (
        Message(round(at, 3), task, "a", number, "takes=0.3", chained=rng.random() < 0.3)
        for number, at in enumerate(times, 1)
    )
    kills = Fault(round(begins + rng.uniform(0.5, 0.9) * takes, 3), "child killed", rng.randrange(9))
    return replace(
        plan,
        messages=(first, *rest),
        faults=(kills,),
        latency=latency,
        pool="prefork",
        workers=rng.choice((1, 2)),
        concurrency=3,
        visibility=60.0,
    )


def pids_come_again(plan: Plan, rng: random.Random) -> Plan:
    """Children die, and their successors have their pids; the main process is stopped as one dies, or cannot free its
    lock.
    """
    task, takes = rng.choice(("shop.late", "shop.again", "shop.retries")), rng.choice((0.5, 1.5))
    messages = tuple(
        Message(round(0.05 + rng.uniform(0.1, 0.5) * number, 3), task, key, number, f"takes={takes}")
        for number, key in enumerate(rng.choices("abcd", k=6))
    )
    faults = [Fault(0.0, "pids come again")]
    for _ in "12":
        at = round(rng.uniform(0.1, 2.5), 3)
        faults.append(Fault(at, "child killed", rng.randrange(99)))
        if rng.random() < 0.5:  # While the main process still frees the lock of the first one.
            faults.append(Fault(round(at + rng.uniform(0.05, 0.4), 3), "child killed", rng.randrange(99)))
        slow = rng.choice(("worker stopped", "cut", "near"))
        faults.append(Fault(round(at - 0.01, 3), slow, 0, round(rng.uniform(0.3, 1.5), 2)))
    faults.sort(key=lambda fault: fault.at)
    plan = replace(plan, messages=messages, faults=tuple(faults), nodes=1, workers=1, concurrency=2, visibility=60.0)
    latency = rng.choice((0.0, 0.01)) * plan.ttl
    return _main_pid_comes_again(plan, rng) if rng.random() < 0.5 else replace(plan, pool="prefork", latency=latency)


def _main_pid_comes_again(plan: Plan, rng: random.Random) -> Plan:
    """A worker with threads is killed, and the next one has its pid; another one on its host waits for its lock."""
    messages = tuple(Message(0.05 + 0.2 * number, "shop.patient", "a", number, "takes=1.5") for number in range(4))
    killed = Fault(round(rng.uniform(0.5, 1.2), 3), "worker killed", rng.randrange(9), round(rng.uniform(0.0, 0.3), 3))
    faults = (Fault(0.0, "pids come again"), killed)
    return replace(
        plan,
        messages=messages,
        faults=faults,
        pool="threads",
        workers=2,
        concurrency=2,
        latency=0.0,
        on_one_host=True,
        in_turns=True,
        ttl=rng.choice((6.0, 10.0)),
    )


def one_id_for_all(plan: Plan, rng: random.Random) -> Plan:
    """Messages of one task with other arguments, and of another task, have one id."""
    task, other = rng.choice((("shop.again", "shop.patient"), ("shop.retries", "shop.again")))
    retries = rng.choice(("", " retries=1 countdown=0.3")) if task == "shop.retries" else ""
    times = (0.05, *(round(rng.uniform(0.1, 4.0), 3) for _ in "123"))
    messages = tuple(
        Message(
            at, task if number < 3 else other, "a", number, f"takes={rng.choice((0.1, 0.8))}{retries}", sent="id=m0"
        )
        for number, at in enumerate(times)
    )
    kinds = ("delivered again", "acknowledgement lost", "woken in vain", "connections closed")
    faults = sorted((round(rng.uniform(0.1, 4.0), 3), rng.choice(kinds), rng.randrange(99)) for _ in "12")
    return replace(
        plan,
        messages=messages,
        faults=tuple(Fault(*fault) for fault in faults),
        nodes=1,
        concurrency=2,
        workers=rng.choice((1, 2)),
        visibility=60.0,
    )


def lost_as_it_is_renewed(plan: Plan, rng: random.Random) -> Plan:
    """A host sleeps while the answer to a renewal is on its way, until the lease is over; others wait for the lock."""
    ttl, latency = plan.ttl, rng.choice((0.02, 0.03)) * plan.ttl
    checks = rng.choice(("", " checks=1"))
    messages = tuple(
        Message(round(0.1 + 0.3 * number, 3), "shop.again", "a", number, f"takes={takes * ttl:g}{checks}")
        for number, takes in enumerate((2.5, 0.5, 0.5))
    )
    renews = 0.1 + 4 * latency + ttl / 3 * rng.uniform(0.9, 1.0) * rng.randint(1, 3)
    sleeps = Fault(
        round(renews + rng.uniform(-1.0, 3.0) * latency, 3), "host suspended", 0, round(rng.uniform(0.9, 1.4) * ttl, 3)
    )
    return replace(
        plan,
        messages=messages,
        faults=(sleeps,),
        latency=latency,
        in_turns=True,
        visibility=60.0,
        nodes=1,
        workers=2,
        concurrency=rng.choice((1, 2)),
    )


def race_for_ticks(plan: Plan, rng: random.Random) -> Plan:
    """Several beats claim each tick at about the same time: claims alone decide, which these faults do not touch."""
    latency = rng.choice((0.01, 0.03, 0.06))
    entries = tuple((f"entry{number}", rng.choice((1.0, 1.0, 2.0))) for number in range(rng.randint(1, 3)))
    kinds = ("slow", "connections closed", "worker killed", "beat ended", "beat killed as it sends", "cut back")
    faults = (
        Fault(round(rng.uniform(0.5, 6.0), 3), rng.choice(kinds), rng.randrange(100), round(rng.uniform(0.0, 2.0), 3))
        for _ in range(rng.randrange(4))
    )
    plan = replace(plan, nodes=1, workers=rng.choice((2, 3)), entries=entries, latency=latency)
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
    return replace(
        plan,
        nodes=1,
        pool=pool,
        ttl=ttl,
        messages=messages,
        faults=tuple(faults),
        visibility=60.0,
        workers=rng.choice((1, 2)),
        concurrency=2,
    )


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
    return replace(
        plan,
        nodes=1,
        messages=messages,
        faults=tuple(Fault(*fault) for fault in faults),
        workers=rng.choice((1, 2)),
        concurrency=2,
        visibility=60.0,
    )


def expires_in_line(plan: Plan, rng: random.Random) -> Plan:
    """Copies wait for a lock for longer than they may, in a worker that has room, or are delivered again there."""
    expires = rng.choice((1.5, 4.0))
    times = (0.1, 0.4, round(rng.uniform(5.0, 9.0), 3))
    messages = tuple(
        Message(at, "shop.behind", "a", number, f"takes={rng.choice((0.2, 3.0, 5.0))}", sent=f"expires={expires}")
        for number, at in enumerate(times)
    )
    faults = (Fault(at, "delivered again", rng.randrange(9)) for at in (0.6, 1.2)[: rng.randrange(3)])
    return replace(
        plan,
        nodes=1,
        messages=messages,
        faults=tuple(faults),
        concurrency=2,
        visibility=60.0,
        workers=rng.choice((1, 2)),
        queue_ttl=None,
    )


BY_KIND: dict[str, tuple[Shape, ...]] = {
    "beats": (race_for_ticks,),
    "joined": (dies_in_its_retry,),
    "sent": (expires_in_line,),
    "tasks": (pids_come_again, one_id_for_all, lost_as_it_is_renewed, stubborn, bounded),
}
