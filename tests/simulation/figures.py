"""The counted outcomes of many simulations."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.simulation.counts import Counts

#: How many seeds of each kind of failure are named.
NAMED = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """The counts of one simulation. A crash or a hang has only a failure."""

    seed: int
    failure: str | None
    #: What is added up: seconds of the simulation and of the processor, messages, bodies, turns of a thread.
    numbers: Mapping[str, float] = field(default_factory=dict)
    #: See `simulate.Result`.
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def kind_of(failure: str) -> str:
    """The kind of a failure: the same for failures that differ only in numbers, keys and tasks."""
    kind = re.sub(r"\[[^\]]*\]", "[…]", failure)
    kind = re.sub(r"\{[^}]*\}", "{…}", kind)
    kind = re.sub(r"\bshop\.\w+(:\w+)?", "shop", kind)
    return re.sub(r"\d+(\.\d+)?", "#", kind)


@dataclass
class Figures:
    """The figures of all simulations so far."""

    seeds: int = 0
    numbers: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    counts: Counts = field(default_factory=Counts)
    failures: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    #: Real time, from the campaign.
    minutes: float = 0.0
    jobs: int = 1

    def add(self, outcome: Outcome) -> None:
        self.seeds += 1
        for name, number in outcome.numbers.items():
            self.numbers[name] += number
        self.counts.add(outcome.counts)
        if outcome.failure is not None:
            self.failures[kind_of(outcome.failure)].append(outcome.seed)

    @property
    def faults(self) -> Counter[str]:
        """Those that struck something."""
        return +self.counts.times["faults"]

    @property
    def failed(self) -> int:
        return sum(len(seeds) for seeds in self.failures.values())

    def _counts(self) -> list[tuple[str, str]]:
        per_core = self.seeds / self.minutes / self.jobs if self.minutes else 0.0
        return [
            ("seeds", f"{self.seeds:,}"),
            ("simulated hours", f"{self.numbers['seconds'] / 3600:,.1f}"),
            ("messages", f"{self.numbers['messages']:,.0f}"),
            ("bodies that began", f"{self.numbers['bodies']:,.0f}"),
            ("turns of a thread", f"{self.numbers['switches']:,.0f}"),
            ("faults", f"{self.faults.total():,}"),
            ("seeds that failed", f"{self.failed:,}"),
            ("minutes", f"{self.minutes:,.1f}"),
            ("seeds per minute and process", f"{per_core:,.0f}"),
            ("CPU of a seed, ms", f"{1000 * self.numbers['cpu'] / max(self.seeds, 1):,.1f}"),
        ]

    def text(self) -> str:
        """For a terminal."""
        lines = [f"{value:>14}  {name}" for name, value in self._counts()]
        lines += self.counts.lines()
        for kind, seeds in self._failures():
            lines += [f"FAILED {len(seeds)}×: {kind}", f"    seeds {_first(seeds)}"]
        return "\n".join(lines)

    def _failures(self) -> list[tuple[str, list[int]]]:
        return sorted(((kind, sorted(seeds)) for kind, seeds in self.failures.items()), key=lambda it: -len(it[1]))


def _first(seeds: list[int]) -> str:
    return ", ".join(map(str, seeds[:NAMED])) + (", …" if len(seeds) > NAMED else "")
