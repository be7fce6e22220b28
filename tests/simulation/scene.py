"""Runs of the simulator for its tests, as separate programs: it changes the interpreter that it runs in."""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from dataclasses import replace

from tests.simulation import found, loading
from tests.simulation.mutants.mutant import Mutant
from tests.simulation.plan import Plan, draw
from tests.simulation.scheduler import Simulation
from tests.simulation.shrinking import shrink
from tests.simulation.simulate import Result, prepare, simulate

#: The seeds of plans.
KINDS = ("tasks", "locks", "beats", "nodes", "sent", "joined", "newest", "follows")


def traces(*seeds: str) -> dict[str, str]:
    """A digest of the trace of each seed."""
    prepare()
    return {seed: _digest(simulate(draw(int(seed)))) for seed in seeds}


#: The size of a plan with one message, one fault and one worker with a child or two.
_SMALL = 5


def left(*seeds: str) -> list[int]:
    """How many simulations are in memory after some were run, and after the same were run once more."""
    prepare()
    counts = []
    for _ in range(2):
        for seed in seeds:
            simulate(draw(int(seed), kind=KINDS[int(seed) % len(KINDS)]))
        gc.collect()
        counts.append(sum(isinstance(it, Simulation) for it in gc.get_objects()))
    return counts


def again(orders: str) -> dict[str, str]:
    """The kept plans that fail now in one of so many orders of events."""
    prepare()
    failed = {}
    for file in sorted(found.FOLDER.glob("*.json")):
        plan = found.read(file)
        for order in range(int(orders)):
            if (failure := simulate(replace(plan, seed=plan.seed + order)).failure) is not None:
                failed[f"{file.stem}, {order}"] = failure
    return failed


def mutant(file: str, old: str, new: str, seeds: str) -> dict[str, object]:
    """The first seed that finds a change of the package, and its plan before and after shrinking.

    A plan that is small by chance is skipped: nothing can be taken from it.
    """
    loading.source.edit = Mutant("", file, old, new).edit
    prepare()
    for seed in range(int(seeds)):
        result = simulate(draw(seed))
        if result.failure is not None and _size(result.plan) > _SMALL:
            small = shrink(result, simulate, orders=4)
            return {
                "seed": seed,
                "failure": result.failure,
                "same": small.failure,
                "before": _size(result.plan),
                "after": _size(small.plan),
            }
    return {"seed": None}


def _size(plan: Plan) -> int:
    return len(plan.messages) + len(plan.faults) + plan.workers + plan.concurrency


def _digest(result: Result) -> str:
    return hashlib.sha256(repr((result.trace, result.switches, result.failure)).encode()).hexdigest()


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    print(json.dumps(globals()[name](*arguments)))
