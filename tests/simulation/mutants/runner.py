"""Simulates mutants until something fails, each in its own process: loaded code cannot be changed."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.simulation import loading
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.plan import draw
from tests.simulation.simulate import prepare, simulate

#: CPU seconds that a seed may take: a mutant may loop.
PATIENCE = 15.0


class Found(NamedTuple):
    """The result for a mutant.

    Attributes:
        mutant: the mutant.
        seed: the one that failed, or the last one.
        failure: what did not hold; None if everything held.
    """

    mutant: Mutant
    seed: int
    failure: str | None


def run_all(mutants: Sequence[Mutant], *, seeds: int, jobs: int, known: Mapping[str, int] | None = None) -> list[Found]:
    """Simulate `jobs` mutants at once, each with the seed that is `known` to find it, and then with up to this many."""
    loading.source.load()
    waiting = list(enumerate(mutants))
    running: dict[int, tuple[int, Mutant, int]] = {}
    found: dict[int, Found] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            place, mutant = waiting.pop(0)
            end, pipe = os.pipe()
            if not (pid := os.fork()):
                first = (known or {}).get(mutant.name)
                _simulate(mutant, [*([] if first is None else [first]), *range(1, seeds + 1)], pipe)
            os.close(pipe)
            running[pid] = place, mutant, end
        pid, status = os.wait()
        place, mutant, end = running.pop(pid)
        with open(end, "rb") as answer:
            said = answer.read()
        result = Found(mutant, *pickle.loads(said)) if said else Found(mutant, 0, f"the process ended with {status}")
        found[place] = result
        print(f"{mutant.name}: {result.seed}, {result.failure}", file=sys.stderr, flush=True)
    return [found[place] for place in sorted(found)]


def report(found: Sequence[Found]) -> str:
    """A table in Markdown."""
    lines = ["| broken promise | in | seed | seen as |", "|---|---|---|---|"]
    for mutant, seed, failure in found:
        seen = "not seen" if failure is None else f"`{failure.replace('|', '/')}`"
        lines.append(f"| {mutant.name} | {Path(mutant.file).name} | {seed} | {seen} |")
    caught = sum(it.failure is not None for it in found)
    return "\n".join([*lines, "", f"{caught} of {len(found)} are found."])


def _simulate(mutant: Mutant, seeds: Sequence[int], pipe: int) -> None:
    """Simulate in a forked child, which ends here."""

    def say(seed: int, failure: str | None) -> None:
        os.write(pipe, pickle.dumps((seed, failure)))
        os._exit(0)

    seed = 0

    def too_long(*_: object) -> None:
        say(seed, "goes round in circles")

    signal.signal(signal.SIGVTALRM, too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, 3 * PATIENCE)
    try:
        loading.source.change(mutant.edit)
        prepare(processes=2, rounds=1)  # A first simulation runs otherwise than the same one later.
        for seed in seeds:
            signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
            failure = simulate(draw(seed, nodes=mutant.nodes, kind=mutant.kind)).failure
            if failure is not None:
                say(seed, failure)
        say(seed, None)
    except BaseException as error:  # noqa: BLE001 - it cannot be loaded, say
        say(seed, f"{type(error).__name__}: {error}"[:300])
