"""How the benchmarks measure: contestants take turns in short rounds, and each is compared within its round.

A ratio is made per round, to the baseline of that same round, so that what the machine does meanwhile hits both; what
is reported is the median of the ratios, and between which values 10 % to 90 % of them lie: that is the noise. Each
round measures the baseline twice: its own ratio says how far apart two equals are here.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from celery_singleton_lock.testing import RedisServer

RESULTS = Path(__file__).parent / "results"

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


class Skipped(Exception):
    """This contestant cannot be measured here, and why."""


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
    """Figures per contestant, one of each per round. Figures are costs, such as seconds."""

    def __init__(self, baseline: str) -> None:
        self.baseline = baseline
        self.figures: dict[str, list[float]] = {}
        self._again: list[float] = []

    def run(self, count: int, contestants: Mapping[str, Callable[[], float]]) -> Rounds:
        """Let all take turns `count` times, in another order each round, the baseline twice."""
        self.figures = {name: [] for name in contestants}
        turns = [*contestants, None]
        for _ in range(count):
            random.shuffle(turns)
            for name in turns:
                if name is None:
                    self._again.append(contestants[self.baseline]())
                else:
                    self.figures[name].append(contestants[name]())
        return self

    def adopt(self, figures: Mapping[str, Sequence[float]]) -> Rounds:
        """Take other figures that were noted in the turns of a `run`: two per round for the baseline."""
        self.figures = {name: list(noted) for name, noted in figures.items()}
        noted = self.figures[self.baseline]
        self.figures[self.baseline], self._again = noted[::2], noted[1::2]
        return self

    def ratio(self, name: str) -> Spread:
        """To the baseline; that of the baseline is to its second turn."""
        theirs = self._again if name == self.baseline and self._again else self.figures[self.baseline]
        return Spread.of(one / other for one, other in zip(self.figures[name], theirs, strict=True))

    def median(self, name: str) -> float:
        """Of the rounds' figures."""
        return statistics.median(self.figures[name])


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The nearest value of a sorted sequence."""
    return ordered[min(round((len(ordered) - 1) * percent / 100), len(ordered) - 1)]


def seconds_per_call(call: Callable[[], object], budget: float) -> tuple[float, float]:
    """Call again and again for `budget` seconds; the mean, and that of the CPU time of this process."""
    count, begun, begun_cpu = 0, time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - begun) < budget or not count:
        call()
        count += 1
    return passed / count, (time.process_time() - begun_cpu) / count


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


def made(makers: Mapping[str, Callable[[], Any]]) -> tuple[dict[str, Any], list[Row]]:
    """Make the contestants that can be made here, and rows that say why the others cannot."""
    contestants, skipped = {}, []
    for name, make in makers.items():
        try:
            contestants[name] = make()
        except Skipped as reason:
            skipped.append(Row(name, None, {"skipped": str(reason)}))
    return contestants, skipped


def save(result: Result, *, quick: bool, server_version: str) -> Path:
    """Write a result beside the conditions of this run."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{result.name}.json"
    content = {**asdict(result), "quick": quick, "machine": machine(server_version)}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return path


def machine(server_version: str) -> dict[str, str]:
    """What a figure depends on, and nothing that says whose machine it is."""
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "cores": str(os.cpu_count()),
        "redis server": server_version,
        **{name: version for name, version in versions.items() if version},
    }


def server_version() -> str:
    """Of the Redis that the benchmarks start."""
    with RedisServer() as server, server.client() as client:
        return str(client.info("server")["redis_version"])


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
