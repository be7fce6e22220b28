"""Simulates mutants until something fails, each in its own process: loaded code cannot be changed."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Sequence
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
        seeds: how many were simulated, including the one that failed.
        failure: what did not hold; None if everything held.
    """

    mutant: Mutant
    seeds: int
    failure: str | None


def run_all(mutants: Sequence[Mutant], *, first: int, seeds: int, jobs: int) -> list[Found]:
    """Simulate each mutant with up to this many seeds, `jobs` mutants at once."""
    loading.source.load()
    waiting, running, found = list(enumerate(mutants)), {}, {}
    while waiting or running:
        while waiting and len(running) < jobs:
            place, mutant = waiting.pop(0)
            end, pipe = os.pipe()
            if not (pid := os.fork()):
                _simulate(mutant, first, seeds, pipe)
            os.close(pipe)
            running[pid] = place, mutant, end
        pid, status = os.wait()
        place, mutant, end = running.pop(pid)
        with open(end, "rb") as answer:
            said = answer.read()
        result = Found(mutant, *pickle.loads(said)) if said else Found(mutant, 0, f"the process ended with {status}")
        found[place] = result
        print(f"{mutant.name}: {result.seeds}, {result.failure}", file=sys.stderr, flush=True)
    return [found[place] for place in sorted(found)]


def report(found: Sequence[Found]) -> str:
    """A table in Markdown."""
    lines = ["| fault | in | breaks | seeds | seen as |", "|---|---|---|---|---|"]
    for mutant, seeds, failure in found:
        seen = f"`{failure.replace('|', '/')}`" if failure is not None else f"not seen: {mutant.unseen or '?'}"
        lines.append(f"| {mutant.name} | {Path(mutant.file).name} | {mutant.breaks} | {seeds} | {seen} |")
    caught = sum(it.failure is not None for it in found)
    return "\n".join([*lines, "", f"{caught} of {len(found)} are found."])


def _simulate(mutant: Mutant, first: int, seeds: int, pipe: int) -> None:
    """Simulate in a forked child, which ends here."""

    def say(count: int, failure: str | None) -> None:
        os.write(pipe, pickle.dumps((count, failure)))
        os._exit(0)

    count = 0

    def too_long(*_: object) -> None:
        say(count, "goes round in circles")

    signal.signal(signal.SIGVTALRM, too_long)
    signal.setitimer(signal.ITIMER_VIRTUAL, 3 * PATIENCE)
    try:
        loading.source.change(mutant.edit)
        prepare(processes=6, rounds=0)
        for count in range(1, seeds + 1):
            signal.setitimer(signal.ITIMER_VIRTUAL, PATIENCE)
            failure = simulate(draw(first + count - 1, nodes=mutant.nodes, kind=mutant.kind)).failure
            if failure is not None:
                say(count, failure)
        say(seeds, None)
    except BaseException as error:  # noqa: BLE001 - it cannot be loaded, say
        say(count, f"{type(error).__name__}: {error}"[:300])
