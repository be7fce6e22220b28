"""How the benchmarks measure: contestants take turns in short rounds, and are compared within each round.

A ratio is computed per round, to the baseline of the same round, so that other work on the machine affects both. The
result is the median of the ratios, with the range from 10 % to 90 % of them: that is the noise. Each
round measures the baseline twice: its ratio to itself shows how far apart two equal runs are on this machine.
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

from tests.redis_server import RedisServer

RESULTS = Path(__file__).parent / "results"

#: How the names of this package's contestants begin.
OWN = "celery-singleton-lock"

#: Packages on whose version a figure depends.
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
    """A median, and the range from 10 % to 90 % of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), percentile(ordered, 10), percentile(ordered, 90))


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant: its `ratio` to the baseline (None without one), and further columns."""

    name: str
    ratio: Spread | None
    columns: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Table:
    """One comparison. Ratios are costs: the lower, the better. Without a baseline there are no ratios."""

    title: str
    baseline: str
    rows: Sequence[Row]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one benchmark, with the conditions that a reader must know."""

    name: str
    title: str
    tables: Sequence[Table]
    notes: Sequence[str]


class Rounds:
    """One figure per contestant and round, two for the baseline. Figures are costs, such as seconds."""

    def __init__(self, baseline: str, figures: Mapping[str, Sequence[float]], again: Sequence[float]) -> None:
        self.baseline, self.figures, self._again = baseline, figures, again

    def ratio(self, name: str) -> Spread:
        """The ratio to the baseline; for the baseline itself, to its second turn."""
        theirs = self._again if name == self.baseline else self.figures[self.baseline]
        return Spread.of(one / other for one, other in zip(self.figures[name], theirs, strict=True))

    def median(self, name: str) -> float:
        """The median of a contestant's figures."""
        return statistics.median(self.figures[name])

    def table(self, title: str, columns: Callable[[str], Mapping[str, str]], *, unrated: Iterable[str] = ()) -> Table:
        """The ratios, with further columns for each contestant."""
        rows = [Row(name, None if name in unrated else self.ratio(name), columns(name)) for name in self.figures]
        return Table(title, self.baseline, rows)


def measured(
    baseline: str, count: int, turns: Mapping[str, Callable[[], Sequence[float]]], *, until: float = math.inf
) -> list[Rounds]:
    """Let all take turns `count` times, in another order each round, the baseline twice; return `Rounds` per figure.

    After the moment `until`, of `time.monotonic()`, no further round begins; there is at least one.
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
    """How many commands a server has carried out, including those in scripts; this look counts the next time."""
    return int(client.info("stats")["total_commands_processed"])


@contextmanager
def apart(*servers: RedisServer) -> Iterator[None]:
    """Keep servers off the core of this process. Otherwise the scheduler moves them together and apart again, and a
    round trip takes twice or half as long from one second to the next.
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
    """Wait until a condition is true; after `seconds`, raise an error with the text `failed`."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{failed} in {seconds:g} s")
        time.sleep(0.02)


def save(result: Result, *, quick: bool, server_version: str) -> Path:
    """Write a result, with the conditions of this run."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{result.name}.json"
    content = {**asdict(result), "quick": quick, "machine": machine(server_version)}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return path


def machine(server_version: str) -> dict[str, str]:
    """What the figures depend on, without anything that identifies the machine."""
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
    """The version of the Redis that the benchmarks start."""
    with RedisServer() as server, server.client() as client:
        return str(client.info("server")["redis_version"])
