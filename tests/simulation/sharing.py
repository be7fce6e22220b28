"""Plans of messages that end as another one, or because a newer one has come: which are joined, followed or superseded,
by which, and what goes wrong meanwhile.
"""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.apps import JOINS, NEWEST
from tests.simulation.plan import Fault, Message, Plan, Shape, one_of
from tests.simulation.sendings import bare, in_canvas, with_sent

#: The ttls to choose from, in seconds.
_TTLS = (3.0, 3.0, 6.0)

#: Faults, with weights and longest durations in ttls.
BEFALLS: dict[str, tuple[float, float]] = {
    "child killed": (4, 0),
    "child killed at an end": (2, 0),
    "worker killed": (4, 0.5),
    "worker ended": (2, 0.3),
    "child stopped": (1, 1.5),
    "worker stopped": (1, 1.5),
    "host suspended": (1, 1.5),
    "server stalled": (2, 1.0),
    "server restarted": (1, 0.5),
    "cut back": (2, 1.0),
    "cut there": (1, 1.0),
    "slow": (2, 1.0),
    "connections closed": (1, 0),
    "delivered again": (5, 0),
    "acknowledgement lost": (3, 0),
    "broker cut": (2, 0.3),
    "results slow": (3, 1.0),
    "revoked": (2, 0),
}

#: Faults that delay nothing, so that everything must happen at once.
BRIEF = ("child killed", "child killed at an end", "delivered again", "acknowledgement lost", "results slow")


def draw_joined(seed: int, _: int | None) -> Plan:
    """The plan of a seed, of tasks that end as the task that has their lock."""
    rng = random.Random(f"joined by {seed}")
    return one_of(OF_JOINED, bare(seed, rng, "joined", _TTLS), rng)


def draw_newest(seed: int, _: int | None) -> Plan:
    """The plan of a seed, of tasks of which only the newest runs."""
    rng = random.Random(f"newest of {seed}")
    return one_of(OF_NEWEST, bare(seed, rng, "newest", _TTLS), rng)


def draw_follows(seed: int, _: int | None) -> Plan:
    """The plan of a seed, of canvas parts that find the lock of another message when they are sent."""
    rng = random.Random(f"follows {seed}")
    return in_canvas(replace(bare(seed, rng, "follows", _TTLS), nodes=1), rng)


def anything_joined(plan: Plan, rng: random.Random) -> Plan:
    """Messages come while another one runs, with any faults."""
    task = rng.choice(sorted(JOINS))
    messages = _messages(plan, rng, task, rng.choice((1.0, 2.0, 1.5 * plan.ttl)))
    return with_sent(plan, messages, _faults(plan, rng, rng.choice((0, 1, 1, 2, 3)), BEFALLS))


def holder_dies(plan: Plan, rng: random.Random) -> Plan:
    """The holder dies after others have joined it, and perhaps the message that runs in its place dies, too."""
    task = rng.choice(("shop.joins", "shop.joins_early", "shop.joins_early"))
    takes = round(rng.uniform(1.0, plan.ttl), 2)
    shortly = rng.choice((0.05, 0.2, takes))
    kind = rng.choice(("child killed", "child killed", "worker killed", "child stopped"))
    if kind == "child killed":
        plan = replace(plan, pool="prefork", workers=rng.choice((1, 1, 2)), concurrency=2)
    faults = [
        Fault(round(rng.uniform(0.5, 0.9 * takes) + number * takes, 3), kind, rng.randrange(100), round(takes, 2))
        for number in range(rng.choice((1, 1, 2)))
    ]
    faults += _faults(plan, rng, rng.choice((0, 0, 1)), {name: BEFALLS[name] for name in BRIEF})
    fails = rng.choice(("", "", " fails=1"))
    first = Message(0.05, task, "a", 0, f"takes={takes:g}{fails}", chained=rng.random() < 0.3)
    rest = _close(rng, task, f"takes={shortly:g}{fails}", rng.randint(2, 4), 0.4, first=1)
    return with_sent(plan, (first, *rest), faults)


def dies_twice(plan: Plan, rng: random.Random) -> Plan:
    """The holder dies, is redelivered, and dies once more, each time after others have joined it."""
    task, takes = "shop.joins", 4.0
    times = (0.05, *(round(rng.uniform(0.1, 0.8), 3) for _ in "12"), *(round(rng.uniform(1.5, 3.0), 3) for _ in "12"))
    messages = tuple(
        Message(at, task, "a", number, f"takes={0.05 if number else takes}", chained=rng.random() < 0.3)
        for number, at in enumerate(times)
    )
    kills = [Fault(round(at + rng.uniform(0, 0.4), 3), "child killed", rng.randrange(9)) for at in (0.9, 3.1)]
    return with_sent(replace(plan, pool="prefork", workers=rng.choice((1, 2)), concurrency=2), messages, kills)


def many_join(plan: Plan, rng: random.Random) -> Plan:
    """So many join that they end one after the other only if each wakes the next one."""
    task = rng.choice(("shop.joins", "shop.joins_early"))
    first = Message(0.05, task, "a", 0, f"takes={rng.choice((6.5, 9))}{rng.choice(('', '', ' large=1'))}")
    rest = _close(rng, task, "takes=0.1", rng.randint(4, 6), 0.1, first=1)
    return with_sent(replace(plan, workers=1, concurrency=2), (first, *rest), [])


def value_is_large(plan: Plan, rng: random.Random) -> Plan:
    """Only the result backend has the holder's value, and gets it late, while another message has the lock."""
    task = rng.choice(("shop.joins", "shop.joins_early", "shop.joins_rests"))
    words = f"takes={rng.choice((0.5, 1.5))} large=1"
    many = rng.randint(3, 6)
    messages = _close(rng, task, words, many, 0.3)
    messages += (Message(round(rng.uniform(1.5, 4.0), 3), task, "a", many, "takes=3", chained=rng.random() < 0.3),)
    slow = [Fault(0.05, "results slow", 0, 4.0)] if rng.random() < 0.6 else []
    return with_sent(plan, messages, slow + _faults(plan, rng, rng.choice((0, 0, 1)), {"delivered again": (1, 0.0)}))


def holder_tries_again(plan: Plan, rng: random.Random) -> Plan:
    """The holder retries: until its next attempt, the lock is free or kept."""
    task = rng.choice(("shop.joins", "shop.joins", "shop.joins_keeps"))
    countdown = rng.choice((0, 0.5, 3.0))
    words = f"takes={rng.choice((0.3, 1.0))} retries={rng.randint(1, 2)} countdown={countdown}"
    first = Message(0.05, task, "a", 0, words, chained=rng.random() < 0.3)
    rest = _messages(plan, rng, task, 1.0 + 2 * countdown, words="takes=0.3", first=1)
    return with_sent(plan, (first, *rest), _faults(plan, rng, rng.choice((0, 1)), {**BEFALLS, "revoked": (4, 0)}))


def answered_as_it_ends(plan: Plan, rng: random.Random) -> Plan:
    """Each message to the lock server takes long: copies ask when the holder ends."""
    latency = round(rng.choice((0.004, 0.02, 0.05)) * plan.ttl, 4)
    takes = rng.choice((0.3, round(rng.uniform(0.6, 2.0), 2)))
    task = rng.choice(("shop.joins", "shop.joins", "shop.joins_patient"))
    messages = tuple(
        Message(
            round(max(0.05 + rng.uniform(0, 4 * latency + 0.1) + (takes - 6 * latency) * (number > 2), 0.05), 4),
            task, "a", number, f"takes={takes if number == 0 else 0.1}", chained=rng.random() < 0.4,
        )
        for number in range(rng.randint(2, 5))
    )  # fmt: skip
    again = [
        Fault(round(0.1 + rng.uniform(0, takes + 8 * latency), 3), "delivered again", rng.randrange(100)) for _ in "12"
    ]
    kills = [Fault(round(0.1 + rng.uniform(0.3, 1.0) * takes, 3), "child killed", rng.randrange(9))]
    return replace(with_sent(plan, messages, again + kills[: rng.randint(0, 1)]), latency=latency, workers=2)


def value_comes_late(plan: Plan, rng: random.Random) -> Plan:
    """Each message to the lock server takes long: copies look just before the holder ends, ask for its lock just after,
    and then only the result backend will have its value.
    """
    latency = round(rng.choice((0.02, 0.03)) * plan.ttl, 4)
    task, takes = rng.choice(("shop.joins", "shop.joins_early")), round(rng.uniform(1.0, 2.5), 2)
    words, many = f"takes={takes} large=1", rng.randint(3, 5)
    messages = tuple(
        Message(round(0.05 + rng.uniform(0.0, 0.4) * (number > 0), 3), task, "a", number, words if not number else
                "takes=0.1 large=1")
        for number in range(many)
    )  # fmt: skip
    faults = [Fault(0.05, "results slow", 0, round(0.05 + takes + rng.uniform(0.5, 1.0), 2))]
    faults += [Fault(round(0.05 + takes + rng.uniform(-5.0, 1.0) * latency, 3), "woken in vain") for _ in "1234"]
    return replace(with_sent(plan, messages, faults), latency=latency, workers=2, concurrency=2)


def anything_newer(plan: Plan, rng: random.Random) -> Plan:
    """Newer messages come while one runs, with any faults."""
    task = rng.choice(sorted(NEWEST))
    messages = _messages(plan, rng, task, rng.choice((1.0, 2.0, 1.5 * plan.ttl)))
    return with_sent(plan, messages, _faults(plan, rng, rng.choice((0, 1, 1, 2, 3)), BEFALLS))


def many_come_at_once(plan: Plan, rng: random.Random) -> Plan:
    """So many come that each finds another one, on workers that have room."""
    task = rng.choice(("shop.newest", "shop.newest_early"))
    first = Message(0.05, task, "a", 0, f"takes={rng.choice((2.0, 9.0))}")
    rest = _close(
        rng, task, f"takes={rng.choice((0.1, 0.5))}", rng.randint(3, 6), rng.choice((0.01, 0.5, 2.5)), first=1
    )
    plan = replace(plan, concurrency=2, latency=rng.choice((0.0, 0.0, 0.02)))
    return with_sent(
        plan, (first, *rest), _faults(plan, rng, rng.choice((0, 0, 1)), {name: BEFALLS[name] for name in BRIEF})
    )


def newest_dies(plan: Plan, rng: random.Random) -> Plan:
    """The worker with the newest message dies, or the holder's, and the broker redelivers their messages."""
    task = rng.choice(("shop.newest", "shop.newest_keeps", "shop.newest_patient"))
    words = f"takes={rng.choice((0.5, 2.0))}{rng.choice(('', '', ' retries=1 countdown=0.5'))}"
    messages = _close(rng, task, words, rng.randint(3, 5), rng.choice((0.5, 1.0)))
    kinds = ("worker killed", "child killed", "worker killed", "broker cut", "worker ended")
    faults = [
        Fault(round(rng.uniform(0.1, 3.0), 3), rng.choice(kinds), rng.randrange(100), round(rng.uniform(0, 2.0), 3))
        for _ in range(rng.randint(1, 3))
    ]
    return with_sent(replace(plan, visibility=rng.choice((6.0, 60.0))), messages, faults)


def kept_for_an_older(plan: Plan, rng: random.Random) -> Plan:
    """Newer messages come while the lock is kept for the next attempt of a message that they stop."""
    task = "shop.newest_stops_kept"
    first = Message(0.05, task, "a", 0, f"takes=0.2 retries=1 countdown={rng.choice((0.5, 2.0))}")
    newer = _close(rng, task, "takes=0.3", rng.randint(2, 4), rng.choice((0.3, 0.6, 1.0)), first=1)
    return with_sent(plan, (first, *newer), _faults(plan, rng, rng.choice((0, 0, 1)), BEFALLS))


def newer_as_it_tries_again(plan: Plan, rng: random.Random) -> Plan:
    """Each message to the lock server takes long: a newer message comes as an attempt ends that keeps the lock for its
    next attempt, too late to stop it.
    """
    task, takes = "shop.newest_stops_kept", rng.choice((0.3, 0.5))
    latency = round(rng.choice((0.01, 0.02)) * plan.ttl, 4)
    first = Message(0.05, task, "a", 0, f"takes={takes} retries={rng.randint(1, 2)} countdown=0")
    # The body begins three messages later, or so.
    newer = [round(0.05 + takes + rng.uniform(-4.0, 4.0) * latency, 3) for _ in range(rng.randint(1, 3))]
    messages = (first, *(Message(at, task, "a", number, "takes=0.2") for number, at in enumerate(newer, 1)))
    return replace(with_sent(plan, messages, []), latency=latency, workers=2, concurrency=2)


OF_JOINED: tuple[Shape, ...] = (
    *(
        anything_joined,
        holder_dies,
        holder_dies,
        dies_twice,
        many_join,
        value_is_large,
        holder_tries_again,
        answered_as_it_ends,
    ),
    *(answered_as_it_ends, value_comes_late, value_comes_late),
)
OF_NEWEST: tuple[Shape, ...] = (
    anything_newer,
    anything_newer,
    many_come_at_once,
    newest_dies,
    kept_for_an_older,
    newer_as_it_tries_again,
)


def _messages(
    plan: Plan, rng: random.Random, task: str, until: float, *, words: str | None = None, first: int = 0
) -> tuple[Message, ...]:
    return tuple(
        Message(
            round(rng.uniform(0.05, until), 3), task, rng.choice("aaab"), number,
            _words(plan, rng, task) if words is None else words, chained=rng.random() < 0.3,
        )
        for number in range(first, first + rng.randint(3, 6))
    )  # fmt: skip


def _close(
    rng: random.Random, task: str, words: str, many: int, apart: float, *, first: int = 0
) -> tuple[Message, ...]:
    """Consecutive messages, each soon after the previous one."""
    return tuple(
        Message(round(0.05 + apart * place * rng.uniform(0.5, 1.0), 3), task, "a", first + place, words,
                chained=rng.random() < 0.3)
        for place in range(many)
    )  # fmt: skip


def _words(plan: Plan, rng: random.Random, task: str) -> str:
    words = [f"takes={round(rng.choice((0.1, 0.5, rng.uniform(0, plan.ttl), rng.uniform(0, 2 * plan.ttl))), 2)}"]
    if rng.random() < 0.15:
        words.append("fails=1")
    if rng.random() < 0.1:
        words.append("large=1")
    # A copy that waits for the next attempt of a message lost with its worker waits as long as that is expected.
    if rng.random() < 0.2 and not task.endswith("_early"):
        words.append(f"retries=1 countdown={rng.choice((0, 0.3, 2))}")
    return " ".join(words)


def _faults(plan: Plan, rng: random.Random, many: int, kinds: dict[str, tuple[float, float]]) -> list[Fault]:
    chosen = rng.choices(list(kinds), [weight for weight, _ in kinds.values()], k=many)
    return [
        Fault(round(rng.uniform(0.1, 2 * plan.ttl), 3), kind, rng.randrange(100),
              round(rng.uniform(0.0, kinds[kind][1] * plan.ttl), 3))
        for kind in chosen
    ]  # fmt: skip
