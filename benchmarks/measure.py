"""How the benchmarks measure: contestants take turns in short rounds, and each is compared within its round.

A ratio is made per round, to the baseline of that same round, so that what the machine does meanwhile hits both; what
is reported is the median of the ratios, and between which values 10 % to 90 % of them lie: that is the noise. Each
round measures the baseline twice: its own ratio says how far apart two equals are here.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from redis import Redis

from celery_singleton_lock.testing import RedisServer

RESULTS = Path(__file__).parent / "results"

#: How the names of this package's contestants begin.
OWN = "celery-singleton-lock"

#: Packages whose version a figure depends on.
PACKAGES = (
    "celery",
    "redis",
    "hiredis",
    "python-redis-lock",
    "pottery",
    "redlock-py",
    "celery-singleton",
    "celery-once",
    "celery-redbeat",
)


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and between which values 10 % to 90 % of the rounds lie."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), percentile(ordered, 10), percentile(ordered, 90))


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant: `ratio` to the baseline, None where there is none, and what else is known, in columns."""

    name: str
    ratio: Spread | None
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Table:
    """One comparison. Ratios are costs: the lower, the better. Without a baseline nothing is compared."""

    title: str
    baseline: str
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class Result:
    """What one benchmark found out, with the conditions that a reader must know."""

    name: str
    title: str
    tables: Sequence[Table]
    notes: Sequence[str]


class Rounds:
    """One figure per contestant and round, two for the baseline. Figures are costs, such as seconds."""

    def __init__(self, baseline: str, figures: Mapping[str, Sequence[float]], again: Sequence[float]) -> None:
        self.baseline, self.figures, self._again = baseline, figures, again

    def ratio(self, name: str) -> Spread:
        """To the baseline; that of the baseline is to its second turn."""
        theirs = self._again if name == self.baseline else self.figures[self.baseline]
        return Spread.of(one / other for one, other in zip(self.figures[name], theirs, strict=True))

    def median(self, name: str) -> float:
        """Of the rounds' figures."""
        return statistics.median(self.figures[name])

    def table(self, title: str, columns: Callable[[str], Mapping[str, str]], *, unrated: Iterable[str] = ()) -> Table:
        """The ratios, beside what else is known of each contestant."""
        rows = [Row(name, None if name in unrated else self.ratio(name), columns(name)) for name in self.figures]
        return Table(title, self.baseline, rows)


def measured(
    baseline: str, count: int, turns: Mapping[str, Callable[[], Sequence[float]]], *, until: float = math.inf
) -> list[Rounds]:
    """Have all take turns `count` times, in another order each round, the baseline twice; `Rounds` for each figure.

    After the moment `until`, of `time.monotonic()`, no other round begins; there is one at least.
    """
    noted: dict[str, list[Sequence[float]]] = {name: [] for name in turns}
    again: list[Sequence[float]] = []
    order = [*((turn, noted[name]) for name, turn in turns.items()), (turns[baseline], again)]
    for number in range(count):
        if number and time.monotonic() >= until:
            break
        random.shuffle(order)
        for turn, its in order:
            its.append(turn())
    return [
        Rounds(baseline, {name: [figures[place] for figures in its] for name, its in noted.items()}, second)
        for place, second in enumerate(zip(*again, strict=True))
    ]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The nearest value of a sorted sequence."""
    return ordered[min(round((len(ordered) - 1) * percent / 100), len(ordered) - 1)]


def commands(client: Redis) -> int:
    """How many a server has carried out, those within scripts included; this look is one of the next count."""
    return int(client.info("stats")["total_commands_processed"])


@contextmanager
def apart(*servers: RedisServer) -> Iterator[None]:
    """Keep servers off the core of this process: else the scheduler moves them together and apart again, and a round
    trip takes twice or half as long from one second to the next.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        yield
        return
    os.sched_setaffinity(0, cores[:1])
    try:
        for server in servers:
            os.sched_setaffinity(server.pid or 0, cores[1:])
        yield
    finally:
        os.sched_setaffinity(0, cores)


def wait_until(true: Callable[[], object], seconds: float, failed: str) -> None:
    """Look again and again; `failed` says what is wrong after that many seconds."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{failed} in {seconds:g} s")
        time.sleep(0.02)


def save(result: Result, *, quick: bool, server_version: str) -> Path:
    """Write a result beside the conditions of this run."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{result.name}.json"
    content = {**asdict(result), "quick": quick, "machine": machine(server_version)}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return path


def machine(server_version: str) -> dict[str, str]:
    """What a figure depends on, and nothing that says whose machine it is."""
    found = {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "cores": str(os.cpu_count()),
        "redis server": server_version,
    }
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def server_version() -> str:
    """Of the Redis that the benchmarks start."""
    with RedisServer() as server, server.client() as client:
        return str(client.info("server")["redis_version"])
