"""What a simulation is to do: which set-up, which messages, which faults. Drawn from a seed before anything runs, and
plain data, so that a plan that breaks a promise can be made smaller.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Message:
    """A call of a task, at a time in seconds; `words` says what its body does."""

    at: float
    task: str
    key: str
    number: int
    words: str
    chained: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong at a time, with a host, worker, child or server, for some seconds."""

    at: float
    kind: str
    target: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """All that a simulation depends on."""

    seed: int
    pool: str
    nodes: int
    workers: int
    concurrency: int
    ttl: float
    visibility: float
    interval: float
    #: Whether the result backend keeps results for a moment only.
    forgets: bool
    messages: tuple[Message, ...]
    faults: tuple[Fault, ...]

    @property
    def calm_at(self) -> float:
        """When the last fault is over, and all was sent."""
        times = [fault.at + fault.seconds for fault in self.faults] + [message.at for message in self.messages]
        return max(times, default=0.0)

    def smaller(self) -> Iterator[Plan]:
        """Plans with one thing less."""
        for index in range(len(self.faults)):
            yield replace(self, faults=self.faults[:index] + self.faults[index + 1 :])
        for index in range(len(self.messages)):
            yield replace(self, messages=self.messages[:index] + self.messages[index + 1 :])
        if self.workers > 1:
            yield replace(self, workers=self.workers - 1)
        if self.concurrency > 1:
            yield replace(self, concurrency=self.concurrency - 1)


#: Kinds of faults with their weights, and the longest that they last in ttls.
KINDS: dict[str, tuple[float, float]] = {
    "child killed": (3, 0),
    "child killed at an end": (2, 0),
    "worker killed": (2, 0.5),
    "child stopped": (2, 2.0),
    "worker stopped": (2, 2.0),
    "host suspended": (2, 2.0),
    "wall clock set": (1, 0),
    "server stalled": (3, 1.5),
    "server restarted": (2, 0.5),
    "server forgets its scripts": (1, 0),
    "connections closed": (2, 0),
    "cut there": (2, 1.5),
    "cut back": (3, 1.5),
    "cut": (2, 1.5),
    "slow": (2, 2.0),
    "delivered again": (3, 0),
    "acknowledgement lost": (2, 0),
    "broker cut": (1, 0.2),
    "broker deaf": (1, 1.0),
    "out of order": (1, 2.0),
}

#: Those that only a Redlock bears, one per plan.
OF_REDLOCK: dict[str, tuple[float, float]] = {"server restarted empty": (4, 0.5)}


def draw(seed: int, *, nodes: int | None = None) -> Plan:
    """The plan of a seed."""
    rng = random.Random(seed)  # noqa: S311
    nodes = nodes if nodes is not None else rng.choice((1, 1, 1, 1, 3))
    ttl = rng.choice((3.0, 6.0, 6.0, 10.0))
    pool = rng.choice(("prefork", "prefork", "threads"))
    tasks = rng.choice(
        (("shop.late",), ("shop.again",), ("shop.late", "shop.again"), ("shop.patient",), ("shop.patient",), ("shop.refuses",), ("shop.rests",), ("shop.two",), ("shop.retries",), ("shop.keeps",), ("shop.skip", "shop.late", "shop.again"))
    )
    until = rng.uniform(1.0, 2.5 * ttl)
    messages = tuple(
        Message(
            round(rng.uniform(0.05, until), 3),
            rng.choice(tasks),
            rng.choice("aab"),
            number,
            _words(rng, ttl),
            chained=rng.random() < 0.2,
        )
        for number in range(rng.randint(2, 6))
    )
    faults = tuple(sorted(_faults(rng, until, ttl, nodes), key=lambda fault: fault.at))
    return Plan(
        seed,
        pool,
        nodes,
        rng.choice((1, 2, 2, 3)),
        rng.choice((1, 2, 2)),
        ttl,
        rng.choice((2 * ttl, 4 * ttl, 60.0)),
        rng.choice((15.0, 60.0, 200.0)),
        rng.random() < 0.2,
        messages,
        faults,
    )


def _words(rng: random.Random, ttl: float) -> str:
    words = [f"takes={round(rng.choice((0.0, 0.1, 0.5, rng.uniform(0, 2 * ttl), rng.uniform(0, ttl))), 2)}"]
    if rng.random() < 0.1:
        words.append("fails=1")
    if rng.random() < 0.15:
        words.append("checks=1")
    if rng.random() < 0.3:
        words.append(f"retries={rng.randint(1, 2)} countdown={rng.choice((0, 0.3, 2))}")
    return " ".join(words)


def _faults(rng: random.Random, until: float, ttl: float, nodes: int) -> Iterator[Fault]:
    kinds = dict(KINDS)
    if nodes > 1 and rng.random() < 0.5:
        yield _fault(rng, "server restarted empty", OF_REDLOCK, until, ttl)
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))):
        kind = rng.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
        yield _fault(rng, kind, kinds, until, ttl)


def _fault(rng: random.Random, kind: str, kinds: dict[str, tuple[float, float]], until: float, ttl: float) -> Fault:
    longest = kinds[kind][1] * ttl
    lengths = rng.uniform(0, 0.3), rng.uniform(0, longest), rng.uniform(longest / 2, longest)
    seconds = rng.choice(lengths) if longest else 0.0
    return Fault(round(rng.uniform(0.05, until), 3), kind, rng.randrange(100), round(min(seconds, longest), 3))
