"""What a simulation is to do: its setup, messages and faults. A plan is drawn from a seed before anything runs, and is
plain data, so that a plan that breaks a promise can be shrunk.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps

#: Seconds in which a link holds back what is sent, each request for as long as the fault says.
HOLDS_BACK = 3.5


@dataclass(frozen=True, slots=True)
class Message:
    """A call of a task, at a time in seconds; `words` says what its body does, `sent` how it is sent."""

    at: float
    task: str
    key: str
    number: int
    words: str
    chained: bool = False
    sent: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a host, worker, child or server at a time, for some seconds."""

    at: float
    kind: str
    target: int = 0
    seconds: float = 0.0

    @property
    def over_at(self) -> float:
        """When it is over; the last requests that are held back have arrived by then."""
        return self.at + self.seconds + (HOLDS_BACK if "held back" in self.kind else 0.0)


@dataclass(frozen=True, slots=True)
class Use:
    """A thread of a program takes a lock outside of tasks at a time, and gives it back.

    Attributes:
        patience: most seconds that it waits; None: without bound.
        takes: seconds for which it keeps the lock.
        ways: what else it does, in words that `locks.py` knows.
    """

    at: float
    program: int
    thread: int
    name: str
    number: int
    patience: float | None
    takes: float
    ways: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a simulation depends on.

    Attributes:
        kind: "tasks" with workers, "locks" in separate programs, "nodes" of a Redlock that disagree about such locks,
            "beats", or "sent": tasks that lock when they are sent; "joined", "newest": tasks that end as another one,
            or of which only the newest runs; "follows": parts of a canvas that are duplicates.
        limits: names of the locks outside of tasks, and how many may hold each.
        entries: names of the beats' schedule, and seconds between two ticks.
        forgets: whether the result backend keeps results only for a moment.
        beyond: the assumption of the guarantees that does not hold, by its name in `beyond.py`; empty if all hold.
        latency: most seconds that a message to or from a lock server takes, if that is more than usual.
        on_one_host: whether all workers are on one host.
        queue_ttl: seconds for which a waiting message may keep others out; None: a day.
        in_turns: whether the workers get messages in turn, or the first one as many as it takes.
        shape: the name of what is rare in it, if it was drawn as such; otherwise its kind.
        is_cluster: whether the lock server is a cluster, see `clusters.py`.
    """

    seed: int
    pool: str
    nodes: int
    workers: int
    concurrency: int
    ttl: float
    visibility: float
    interval: float
    messages: tuple[Message, ...]
    faults: tuple[Fault, ...]
    kind: str = "tasks"
    uses: tuple[Use, ...] = ()
    limits: tuple[tuple[str, int], ...] = ()
    entries: tuple[tuple[str, float], ...] = ()
    forgets: bool = False
    beyond: str = ""
    latency: float = 0.0
    on_one_host: bool = False
    queue_ttl: float | None = None
    in_turns: bool = False
    shape: str = ""
    is_cluster: bool = False

    @property
    def calm_at(self) -> float:
        """When the last fault is over, and everything was sent."""
        times = [fault.over_at for fault in self.faults]
        times += [sent.at for sent in (*self.messages, *self.uses)]
        return max(times, default=0.0)

    def smaller(self) -> Iterator[Plan]:
        """Plans with one part less."""
        for index in range(len(self.faults)):
            yield replace(self, faults=self.faults[:index] + self.faults[index + 1 :])
        for index in range(len(self.messages)):
            yield replace(self, messages=self.messages[:index] + self.messages[index + 1 :])
        for index in range(len(self.uses)):
            yield replace(self, uses=self.uses[:index] + self.uses[index + 1 :])
        for index in range(len(self.entries)):
            yield replace(self, entries=self.entries[:index] + self.entries[index + 1 :])
        if self.workers > 1:
            yield replace(self, workers=self.workers - 1)
        if self.concurrency > 1:
            yield replace(self, concurrency=self.concurrency - 1)


#: Kinds of plans with their weights; "lines" are tasks whose copies wait in line. And the share of all plans that have
#: a Redlock whose nodes disagree (`disagreements.py`).
PLANS = {"tasks": 47, "lines": 19, "locks": 26, "beats": 8}
OF_NODES = 0.15

#: Share of all plans that send messages with locks (`sendings.py`).
OF_SENT = 0.15

#: Share of all plans with messages that end as another one, or because a newer one has come (`sharing.py`).
OF_SHARED = 0.18

#: Share of the plans in which workers get messages in turn, which others get before the first one is full.
IN_TURNS = 0.5

#: Makes another plan of one, in which certain things come together.
Shape = Callable[["Plan", random.Random], "Plan"]

#: Draws the plan of a seed, with a given number of servers, or with any number.
Drawing = Callable[[int, "int | None"], Plan]

#: Kinds of faults with their weights, and their longest durations in ttls.
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
    "slow": (4, 2.0),
    "delivered again": (3, 0),
    "acknowledgement lost": (2, 0),
    "broker cut": (1, 0.2),
    "broker deaf": (1, 1.0),
    "out of order": (1, 2.0),
}

#: Share of the plans in which requests are held back, and for how many seconds: until another try is made, until nobody
#: waits any more, or until long after that.
HELD_BACK = 0.2
LATE = ((0.5, 2.0), (1.5, 6.0), (5.0, 25.0))

#: Faults that only a Redlock tolerates, one per plan.
OF_REDLOCK: dict[str, tuple[float, float]] = {"server restarted empty": (4, 0.5)}


#: The number of the use with which the nodes of a Redlock begin to remember.
FIRST = 100

#: Additional faults for beats.
OF_BEATS: dict[str, tuple[float, float]] = {"beat ended": (2, 0.5), "broker refuses": (2, 1.0)}

#: Faults that strike only workers, children and consumers.
NOT_OF_PROGRAMS = frozenset(
    {"child killed", "child killed at an end", "child stopped", "delivered again", "acknowledgement lost"}
    | {"broker cut", "broker deaf", "out of order"}
)


def draw(seed: int, *, nodes: int | None = None, kind: str | None = None) -> Plan:
    """The plan of a seed; of this kind, if it is given."""
    from tests.simulation.disagreements import draw_nodes
    from tests.simulation.rare import perhaps_rare
    from tests.simulation.sendings import draw_sent
    from tests.simulation.sharing import draw_follows, draw_joined, draw_newest

    if kind is None:
        is_of_nodes = nodes != 1 and random.Random(f"nodes of {seed}").random() < OF_NODES
        kind = random.Random(f"kind of {seed}").choices(list(PLANS), list(PLANS.values()))[0]
        kind = "nodes" if is_of_nodes else kind
        if nodes is None and random.Random(f"sent of {seed}").random() < OF_SENT:
            kind = "sent"
        if nodes is None and random.Random(f"shared of {seed}").random() < OF_SHARED:
            kind = random.Random(f"shared by {seed}").choice(("joined", "newest", "follows"))
    draws: dict[str, Drawing] = {"tasks": _tasks, "lines": _lines, "locks": _locks}
    draws |= {"beats": _beats, "nodes": draw_nodes, "sent": draw_sent}
    draws |= {"joined": draw_joined, "newest": draw_newest, "follows": draw_follows}
    plan = draws[kind](seed, nodes)
    plan = plan if nodes is not None else perhaps_rare(plan)
    if plan.nodes > 1:  # A Redlock refuses it.
        plan = replace(plan, messages=tuple(_with_one_holder(message) for message in plan.messages))
    in_turns = plan.in_turns or random.Random(f"in turns of {seed}").random() < IN_TURNS
    return replace(plan, in_turns=in_turns, shape=plan.shape or kind)


def _with_one_holder(message: Message) -> Message:
    return replace(message, task="shop.again") if message.task == "shop.two" else message


def one_of(shapes: Sequence[Shape], plan: Plan, rng: random.Random, by: random.Random | None = None) -> Plan:
    """The plan in one of these shapes, chosen with `by`."""
    shape = (by or rng).choice(shapes)
    return replace(shape(plan, rng), shape=shape.__name__)


def _may_be_shaped(draws: Drawing) -> Drawing:
    """Let it draw its plan, or one of the shapes."""

    @wraps(draws)
    def drawn(seed: int, nodes: int | None) -> Plan:
        from tests.simulation.shapes import shaped  # It builds on the plans that are drawn here.

        plan = draws(seed, nodes)
        return plan if nodes is not None else shaped(plan)

    return drawn


@_may_be_shaped
def _tasks(seed: int, nodes: int | None) -> Plan:
    rng = random.Random(seed)
    nodes = nodes if nodes is not None else rng.choice((1, 1, 1, 1, 3))
    ttl = rng.choice((3.0, 6.0, 6.0, 10.0))
    pool = rng.choice(("prefork", "prefork", "threads"))
    tasks = rng.choice(
        (
            ("shop.late",),
            ("shop.again",),
            ("shop.late", "shop.again"),
            ("shop.patient",),
            ("shop.patient",),
            ("shop.refuses",),
            ("shop.rests",),
            ("shop.two",),
            ("shop.retries",),
            ("shop.keeps",),
            ("shop.skip", "shop.late", "shop.again"),
        )
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
    asked = [message.at for message in messages]
    faults = tuple(
        sorted(
            (*_faults(rng, until, ttl, nodes, KINDS), *_held_back(seed, asked, dies=True)), key=lambda fault: fault.at
        )
    )
    return Plan(
        seed,
        pool,
        nodes,
        rng.choice((1, 2, 2, 3)),
        rng.choice((1, 2, 2)),
        ttl,
        rng.choice((2 * ttl, 4 * ttl, 60.0)),
        rng.choice((15.0, 60.0, 200.0)),
        messages,
        faults,
        forgets=rng.random() < 0.2,
    )


def _lines(seed: int, _: int | None) -> Plan:
    from tests.simulation.lines import lined_up

    return lined_up(_tasks(seed, 1), random.Random(f"in line of {seed}"))


@_may_be_shaped
def _locks(seed: int, nodes: int | None) -> Plan:
    rng = random.Random(seed)
    nodes = nodes if nodes is not None else rng.choice((1, 1, 3))
    ttl = rng.choice((1.0, 3.0, 6.0, 10.0))
    programs, threads = rng.choice((1, 2, 2, 3)), rng.choice((1, 1, 2))
    limits = (("a", 1), ("b", 1 if nodes > 1 else rng.choice((1, 2, 3))))
    until = rng.uniform(1.0, 2.5 * ttl)
    # A new node of a Redlock has no vote for one ttl: one use asks first, and the others come later.
    begins = 0.0 if nodes == 1 else 1.1 * ttl
    first = () if nodes == 1 else (Use(0.0, 0, 0, "a", FIRST, 0.0, 0.0),)
    uses = first + tuple(
        Use(
            round(begins + rng.uniform(0.05, until), 3),
            rng.randrange(programs),
            rng.randrange(threads),
            rng.choice(("a", "b", "b")),
            number,
            rng.choice((None, None, 0.0, round(rng.uniform(0.05, 3 * ttl), 3))),
            round(rng.choice((0.0, 0.1, 0.5, rng.uniform(0, 2 * ttl))), 2),
            _ways(rng, nodes),
        )
        for number in range(rng.randint(3, 9))
    )
    kinds = {kind: how for kind, how in KINDS.items() if kind not in NOT_OF_PROGRAMS}
    befall = (replace(fault, at=begins + fault.at) for fault in _faults(rng, until, ttl, nodes, kinds))
    befall = (*befall, *_held_back(seed, [use.at for use in uses]))
    faults = tuple(sorted(befall, key=lambda fault: fault.at))
    interval = rng.choice((15.0, 60.0, 200.0))
    return Plan(seed, "none", nodes, programs, threads, ttl, 60.0, interval, (), faults, "locks", uses, limits)


def _ways(rng: random.Random, nodes: int) -> tuple[str, ...]:
    often = {"with": 0.3, "checks": 0.3, "fixed": 0.15, "reacquire": 0.2, "shared": 0.2}
    # All locks with one key on a Redlock have the same ttl.
    often["extend"] = 0.2 if nodes == 1 else 0.0
    return tuple(way for way, chance in often.items() if rng.random() < chance)


@_may_be_shaped
def _beats(seed: int, nodes: int | None) -> Plan:
    rng = random.Random(seed)
    nodes = nodes if nodes is not None else rng.choice((1, 1, 1, 3))
    ttl = rng.choice((3.0, 6.0, 10.0))
    until = rng.uniform(2.0, 2.5 * ttl)
    entries = tuple(
        (f"entry{number}", rng.choice((1.0, 2.0, 5.0, round(rng.uniform(0.7, 2 * ttl), 2))))
        for number in range(rng.randint(1, 3))
    )
    kinds = {kind: how for kind, how in KINDS.items() if kind not in NOT_OF_PROGRAMS and kind != "wall clock set"}
    befall = (*_faults(rng, until, ttl, nodes, kinds | OF_BEATS), *_held_back(seed, [0.5, 1.0, until / 2, until]))
    faults = tuple(sorted(befall, key=lambda fault: fault.at))
    beats = rng.choice((1, 2, 2, 3))
    interval = rng.choice((15.0, 60.0, 200.0))
    return Plan(seed, "threads", nodes, beats, 2, ttl, 60.0, interval, (), faults, "beats", entries=entries)


def _words(rng: random.Random, ttl: float) -> str:
    words = [f"takes={round(rng.choice((0.0, 0.1, 0.5, rng.uniform(0, 2 * ttl), rng.uniform(0, ttl))), 2)}"]
    if rng.random() < 0.1:
        words.append("fails=1")
    if rng.random() < 0.15:
        words.append("checks=1")
    if rng.random() < 0.3:
        words.append(f"retries={rng.randint(1, 2)} countdown={rng.choice((0, 0.3, 2))}")
    return " ".join(words)


def _faults(
    rng: random.Random, until: float, ttl: float, nodes: int, kinds: dict[str, tuple[float, float]]
) -> Iterator[Fault]:
    if nodes > 1 and rng.random() < 0.5:
        yield _fault(rng, "server restarted empty", OF_REDLOCK, until, ttl)
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4))):
        kind = rng.choices(list(kinds), [weight for weight, _ in kinds.values()])[0]
        yield _fault(rng, kind, kinds, until, ttl)


def _held_back(seed: int, asked: Sequence[float], *, dies: bool = False) -> Iterator[Fault]:
    """In some plans, hold back requests from around one of these times, when a process asks; it may die meanwhile."""
    rng = random.Random(f"held back of {seed}")
    if rng.random() < HELD_BACK:
        at = rng.choice(asked) + rng.choice((0.0, rng.uniform(0, 0.02), rng.uniform(0, 2)))
        yield Fault(round(at, 4), "requests held back", rng.randrange(100), round(rng.uniform(*rng.choice(LATE)), 3))
        if dies and rng.random() < 0.4:
            yield Fault(round(at + rng.uniform(0.02, 2), 4), "child killed", rng.randrange(100))


def _fault(rng: random.Random, kind: str, kinds: dict[str, tuple[float, float]], until: float, ttl: float) -> Fault:
    longest = kinds[kind][1] * ttl
    lengths = rng.uniform(0, 0.3), rng.uniform(0, longest), rng.uniform(longest / 2, longest)
    seconds = rng.choice(lengths) if longest else 0.0
    return Fault(round(rng.uniform(0.05, until), 3), kind, rng.randrange(100), round(min(seconds, longest), 3))
