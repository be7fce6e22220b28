"""Plans of a Redlock whose nodes disagree: programs with locks, and with copies of messages, while each node is cut
off, slow, late or forgetful for another client. They run without Celery, and cost little.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tests.simulation.plan import FIRST, LATE, Fault, Plan, Use

#: Share of the plans that have copies of messages; and the beginning of a use's way that makes it a copy.
HAVE_COPIES, COPY_OF = 0.5, "copy of "

#: Share of a ttl after which a lock is given back that few nodes get back: before its first renewal, which would give
#: it to the node that has missed it.
GIVEN_BACK = 0.32

#: Faults besides those of the theme, with their longest duration in ttls.
OTHERS = {
    "worker killed": 0.5,
    "worker stopped": 1.5,
    "host suspended": 1.5,
    "server stalled": 1.0,
    "server restarted": 0.5,
    "server forgets its scripts": 0.0,
    "connections closed": 0.0,
}


@dataclass(frozen=True, slots=True)
class _Setting:
    """The setting for which a theme makes its faults."""

    rng: random.Random
    nodes: int
    programs: int
    ttl: float
    begins: float
    until: float
    uses: Sequence[Use]

    def asks(self) -> Use:
        """A random use."""
        return self.rng.choice(self.uses)

    def of_each(self) -> Iterator[tuple[int, int]]:
        """Pairs of (nearly) each program and a node that no other program has, if there are enough nodes."""
        order = self.rng.sample(range(self.nodes), self.nodes)
        for program in range(self.programs):
            if self.rng.random() < 0.8:
                yield program, order[program % self.nodes]


def way(program: int, node: int, *, passes: int = 0) -> int:
    """The target of a fault on the way from a program to a node; `passes` messages pass before others are held back."""
    return passes * 100 + program * 10 + node


def draw_nodes(seed: int, nodes: int | None) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"nodes that disagree of {seed}")
    nodes = nodes if nodes is not None else rng.choice((3, 3, 3, 5))
    theme = rng.choices([*THEMES], [*THEMES.values()])[0]
    # Leftovers on a node that was away are checked some time later: they must still be there.
    ttl = 20.0 if theme is _away else rng.choice((1.0, 3.0, 6.0, 15.0))
    programs, threads = rng.choice((2, 2, 3)), rng.choice((1, 1, 2))
    # A new node of a Redlock has no vote for one ttl: one use asks first, and the others come later.
    begins, until = 1.1 * ttl, rng.uniform(1.0, 2.5) * ttl
    uses = [Use(0.0, 0, 0, "a", FIRST, 0.0, 0.0)]
    messages = rng.randint(1, 2) if theme is not _slow and rng.random() < HAVE_COPIES else 0
    for number in range(rng.randint(4, 9)):
        at, program = round(begins + rng.uniform(0.0, until), 3), rng.randrange(programs)
        ways = _ways(rng, theme, messages)
        name = "a" if messages or rng.random() < 0.7 else "b"
        patience = rng.choice((None, None, 0.0, 0.3, round(rng.uniform(0.05, 2 * ttl), 3)))
        takes = rng.choice((0.0, 0.1, 0.5, rng.uniform(0, 2 * ttl), rng.uniform(0, ttl)))
        takes = 1.2 * ttl if "fixed" in ways else takes
        takes = rng.uniform(0.4, 1.2) * ttl if theme is _put_back else takes
        uses.append(Use(at, program, rng.randrange(threads), name, number, patience, round(takes, 2), ways))
    if theme in _USES:
        uses[1:] = _USES[theme](rng, programs, begins, ttl)
    elif theme is _given_back_to_few:
        uses[1] = Use(round(begins + 0.2 * ttl, 3), 0, 9, "a", 0, None, GIVEN_BACK * ttl)
    setting = _Setting(rng, nodes, programs, ttl, begins, until, uses[1:])
    faults = [*theme(setting)]
    if theme is not _calm and rng.random() < 0.3:
        faults += rng.choices([*THEMES], [*THEMES.values()])[0](setting)
    if theme is not _calm and rng.random() < 0.3:
        faults.append(_other(setting))
    faults.sort(key=lambda fault: fault.at)
    interval = rng.choice((15.0, 60.0, 200.0))
    limits = (("a", 1), ("b", 1))
    plan = Plan(seed, "none", nodes, programs, threads, ttl, 60.0, interval, (), (*faults,), "nodes", (*uses,), limits)
    return replace(plan, shape=named(theme))


def named(theme: Theme) -> str:
    """The shape of plans with this theme."""
    return f"nodes: {theme.__name__.strip('_')}"


def _ways(rng: random.Random, theme: Theme, messages: int) -> tuple[str, ...]:
    if messages and rng.random() < 0.7:
        return (f"{COPY_OF}m{rng.randrange(messages)}",)
    often = {"with": 0.2, "checks": 0.3, "fixed": 0.1, "reacquire": 0.3, "shared": 0.2}
    if theme is _slow:
        often |= {"fixed": 0.6, "reacquire": 0.6}
    return tuple(each for each, chance in often.items() if rng.random() < chance)


def _partitions(it: _Setting) -> Iterator[Fault]:
    """In consecutive phases, each program is cut off from another node."""
    rng, at = it.rng, it.begins + it.rng.uniform(-0.2, 0.5) * it.ttl
    for _ in range(rng.randint(1, 4)):
        seconds = rng.choice((rng.uniform(0.05, 0.4), rng.uniform(0.4, 1.5))) * it.ttl
        kind = rng.choice(("cut", "cut there", "cut back"))
        for program, node in it.of_each():
            yield Fault(round(at, 3), f"way {kind}", way(program, node), round(seconds, 3))
            if rng.random() < (0.7 if it.nodes > 3 else 0.3):
                yield Fault(round(at, 3), f"way {kind}", way(program, (node + 1) % it.nodes), round(seconds, 3))
        at += seconds * rng.choice((1.01, 1.01, rng.uniform(0.5, 1.5)))


def _forgets(it: _Setting) -> Iterator[Fault]:
    """Nodes come back empty just after their vote, or while a lock is held that they know and others do not."""
    rng = it.rng
    for _ in range(rng.randint(1, 3)):
        at = it.asks().at + rng.choice((rng.uniform(0, 0.02), rng.uniform(0, 0.5 * it.ttl)))
        away = rng.choice((0.01, rng.uniform(0, 0.3 * it.ttl)))
        node = rng.randrange(it.nodes)
        yield Fault(round(at, 4), "server restarted empty", node, round(away, 3))
        if rng.random() < 0.5:
            yield Fault(round(at, 4), "server flushed", node + 1)
    if rng.random() < 0.7:
        yield from _partitions(it)


def _held_back(it: _Setting) -> Iterator[Fault]:
    """Requests to some nodes arrive late; the connection may have broken by then."""
    rng = it.rng
    for _ in range(rng.randint(1, 3)):
        use = it.asks()
        at = use.at + rng.choice((0.0, rng.uniform(0, 0.02), rng.uniform(0, 2)))
        kind = rng.choice(("way held back", "way held back and broken", "way held back and broken"))
        for node in rng.sample(range(it.nodes), rng.choice((1, 1, 2))):
            late = round(rng.uniform(*rng.choice(LATE)), 3)
            yield Fault(round(at, 4), kind, way(use.program, node, passes=rng.choice((0, 0, 0, 1, 2))), late)


def _put_back(it: _Setting) -> Iterator[Fault]:
    """A node loses a hold that others have, and gets it back late: after the lock was freed, or has another holder."""
    rng = it.rng
    for _ in range(rng.randint(1, 2)):
        passes, node = rng.choice((1, 1, 1, 2)), rng.randrange(it.nodes)
        kind = rng.choice(("put back late", "put back late", "put back late by the dead"))
        at, late = it.begins + rng.uniform(-1.0, 0.8 * it.until), rng.uniform(0.1, 3.0) * it.ttl
        yield Fault(round(at, 3), kind, way(0, node, passes=passes), round(late, 3))


def _swapped(it: _Setting) -> Iterator[Fault]:
    """The holder loses one node after the other, and a client that asks for the lock sees only these."""
    one, other, third = it.rng.sample(range(3), 3)
    turns = it.begins + it.rng.uniform(1.4, 1.7) * it.ttl
    yield Fault(round(it.begins, 3), "way cut", way(0, one), round(turns - it.begins - 0.001, 3))
    yield Fault(round(turns, 3), "way cut", way(0, other), round(1.5 * it.ttl, 3))
    for program in range(1, it.programs):
        yield Fault(round(turns - 0.2 * it.ttl, 3), "way cut", way(program, third), round(1.7 * it.ttl, 3))


def _one_has_it(rng: random.Random, programs: int, begins: float, ttl: float) -> Iterator[Use]:
    """One use has the lock for long, and many ask for it."""
    yield Use(round(begins + 0.3 * ttl, 3), 0, 0, "a", 0, None, 3 * ttl)
    for number in range(1, rng.randint(4, 7)):
        at = begins + rng.uniform(0.8, 1.6) * ttl
        yield Use(round(at, 3), 1 + number % (programs - 1), number, "a", number, None, 0.1)


def _given_back_to_few(it: _Setting) -> Iterator[Fault]:
    """The only node that can be reached for the release was away for the acquire."""
    one, *others = it.rng.sample(range(it.nodes), it.nodes)
    taken_at = it.begins + 0.2 * it.ttl
    away_from = taken_at - it.rng.uniform(0.02, 0.1) * it.ttl
    yield Fault(round(away_from, 3), "server restarted", one, round(taken_at + 0.1 - away_from, 3))
    turns = taken_at + GIVEN_BACK * it.ttl - it.rng.uniform(0.0, 0.1) * it.ttl
    kind = it.rng.choice(("way cut", "way cut there", "way cut back"))
    for node in others:
        yield Fault(round(turns, 3), kind, way(0, node), round(0.4 * it.ttl, 3))


def _away(it: _Setting) -> Iterator[Fault]:
    """A node is away during releases, and during attempts that fail."""
    rng = it.rng
    for _ in range(rng.randint(1, 2)):
        use = it.asks()
        at = use.at + rng.choice((rng.uniform(-0.1, 0.1) * it.ttl, use.takes - rng.uniform(0, 0.1) * it.ttl))
        away = round(rng.uniform(0.02, 0.2) * it.ttl, 3)
        yield Fault(round(max(at, it.begins), 3), "server restarted", rng.randrange(it.nodes), away)


def _refusals(it: _Setting) -> Iterator[Fault]:
    """Requests arrive at each node in another order."""
    for program in range(it.programs):
        for node in range(it.nodes):
            yield Fault(round(it.begins, 3), "way slow", way(program, node), round(3 * it.ttl, 3))


def _copies(rng: random.Random, programs: int, begins: float, ttl: float) -> Iterator[Use]:
    """Copies of a message: some meet a holder that frees the lock just then, others come later."""
    takes = rng.uniform(0.2, 1.0) * ttl
    yield Use(round(begins + 0.1 * ttl, 3), 0, 0, "a", 0, None, round(takes, 2))
    for number in range(1, rng.randint(6, 9)):
        at = begins + 0.1 * ttl + takes + rng.choice((rng.uniform(0.0, 0.12), rng.uniform(0.0, 0.12), 1.5)) * ttl
        body = rng.choice((0.0, 0.0, round(0.02 * ttl, 3)))
        yield Use(round(at, 3), number % programs, number, "a", number, 0.0, body, (f"{COPY_OF}m0",))


def _beside_a_run(it: _Setting) -> Iterator[Fault]:
    """A program has few nodes to itself, and others hear late of what it does."""
    node, begins = it.rng.randrange(it.nodes), it.begins + 0.05 * it.ttl
    yield Fault(round(begins, 3), it.rng.choice(("way cut", "way cut there")), way(0, node), round(2 * it.ttl, 3))
    for program in range(1, it.programs):
        for node in range(it.nodes):
            yield Fault(round(begins, 3), "way slow", way(program, node), round(2 * it.ttl, 3))


def _copies_beside_a_run(rng: random.Random, programs: int, begins: float, ttl: float) -> Iterator[Use]:
    """A lock becomes free, and a copy of a message takes it, while other copies are about to be refused."""
    takes = rng.uniform(0.15, 0.4) * ttl
    free_at = begins + 0.1 * ttl + takes
    yield Use(round(begins + 0.1 * ttl, 3), 0, 0, "a", 0, None, round(takes, 3))
    after = [rng.uniform(-0.04, -0.01) for _ in "12"]
    after += [rng.uniform(0.0, 0.12) for _ in range(rng.randint(2, 4))]
    after += [rng.uniform(0.2, 0.6) for _ in "12"]
    for number, share in enumerate(after, 1):
        program = 1 + number % (programs - 1)
        # They have connections by then.
        yield Use(round(begins - 0.05 * ttl, 3), program, number, "b", 20 + number, 0.0, 0.0)
        yield Use(round(free_at + share * ttl, 3), program, number, "a", number, 0.0, 0.0, (f"{COPY_OF}m0",))
    at, body = free_at + rng.uniform(0.005, 0.02) * ttl, round(rng.uniform(0.0, 0.08) * ttl, 3)
    yield Use(round(at, 3), 0, 19, "a", 19, 0.0, body, (f"{COPY_OF}m0",))


def _taken_back_late(it: _Setting) -> Iterator[Fault]:
    """A waiter gets the nodes that the holder cannot reach, and gives them back late."""
    node = it.rng.randrange(it.nodes)
    yield Fault(round(it.begins + 0.05 * it.ttl, 3), "way cut", way(0, node), round(it.ttl, 3))
    for use in it.uses:
        if use.program:
            late, passes = it.rng.uniform(0.3, 1.0) * it.ttl, it.rng.choice((1, 1, 3, 0, 2))
            kind = it.rng.choice(("way held back and broken", "way held back and broken", "way held back"))
            yield Fault(round(use.at - 0.001, 3), kind, way(use.program, node, passes=passes), round(late, 3))


def _one_waits(rng: random.Random, programs: int, begins: float, ttl: float) -> Iterator[Use]:
    """A use has the lock, and others wait for it, each of which keeps it for some time."""
    yield Use(round(begins + 0.1 * ttl, 3), 0, 0, "a", 0, None, round(rng.uniform(0.2, 0.6) * ttl, 3))
    for program in range(1, programs):
        # They have connections by then.
        yield Use(round(begins, 3), program, 1, "b", 20 + program, 0.0, 0.0)
        at = begins + rng.uniform(0.15, 0.3) * ttl
        yield Use(round(at, 3), program, 1, "a", program, None, round(1.2 * ttl, 3))


def _forgotten_by_most(it: _Setting) -> Iterator[Fault]:
    """Most nodes lose a hold that its holder has just got, and what it sends them after its first renewal is late."""
    keeps, taken_at = it.rng.randrange(it.nodes), it.begins + 0.1 * it.ttl
    for node in range(it.nodes):
        if node != keeps:
            lost_at = taken_at + it.rng.uniform(0.006, 0.02) * it.ttl
            yield Fault(round(lost_at, 3), "server flushed", node)
            late = round(it.rng.uniform(1.0, 2.0) * it.ttl, 3)
            yield Fault(round(taken_at + 0.3 * it.ttl, 3), "way held back", way(0, node, passes=1), late)


def _one_has_it_for_long(rng: random.Random, programs: int, begins: float, ttl: float) -> Iterator[Use]:
    """A use has the lock for long, and others wait for it."""
    yield Use(round(begins + 0.1 * ttl, 3), 0, 0, "a", 0, None, round(2 * ttl, 3))
    for program in range(1, programs):
        at = begins + rng.uniform(0.12, 0.5) * ttl
        yield Use(round(at, 3), program, 1, "a", program, None, round(0.5 * ttl, 3))


def _slow(it: _Setting) -> Iterator[Fault]:
    """Answers come just in time."""
    for program in range(it.programs):
        kind = it.rng.choice(("way slow", "way slow", "way very slow"))
        for node in range(it.nodes):
            yield Fault(round(it.begins - 0.1 * it.ttl, 3), kind, way(program, node), round(it.until + it.ttl, 3))


def _calm(_: _Setting) -> Iterator[Fault]:
    """Nothing goes wrong."""
    yield from ()


def _other(it: _Setting) -> Fault:
    kind, rng = it.rng.choice([*OTHERS]), it.rng
    seconds = round(rng.uniform(0, OTHERS[kind] * it.ttl), 3)
    return Fault(round(it.begins + rng.uniform(0.05, it.until), 3), kind, rng.randrange(100), seconds)


Theme = Callable[[_Setting], Iterator[Fault]]

#: What goes wrong, and its weight.
THEMES: dict[Theme, int] = {
    _partitions: 5,
    _forgets: 3,
    _held_back: 4,
    _put_back: 2,
    _swapped: 2,
    _given_back_to_few: 1,
    _away: 2,
    _refusals: 3,
    _beside_a_run: 5,
    _taken_back_late: 3,
    _forgotten_by_most: 1,
    _slow: 2,
    _calm: 3,
}

#: Themes with other uses than any.
_USES: dict[Theme, Callable[[random.Random, int, float, float], Iterator[Use]]] = {
    _refusals: _copies,
    _swapped: _one_has_it,
    _beside_a_run: _copies_beside_a_run,
    _taken_back_late: _one_waits,
    _forgotten_by_most: _one_has_it_for_long,
}
