"""`python -m tests.simulation`: many seeds, or one."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.simulation import campaign, found, table
from tests.simulation.figures import Figures, Outcome, kind_of
from tests.simulation.plan import Plan, draw
from tests.simulation.shrinking import shrink

if TYPE_CHECKING:
    from tests.simulation.simulate import Result

#: How many failures of one kind are printed when they come.
PRINTED = 3


def main() -> int:
    options = _options()
    if options.plan is not None:
        return _one(found.read(options.plan), options)
    if options.seed is not None:
        return _one(draw(options.seed, nodes=options.nodes), options)
    return _many(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description="Simulate workers and lock servers."
    )
    parser.add_argument("--seeds", type=_seeds, default=range(1000), help="how many, or A..B (default: 1000)")
    parser.add_argument("--minutes", type=float, help="stop after these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: one for each core)")
    parser.add_argument("--seed", type=int, help="this one, with its trace")
    parser.add_argument("--plan", type=Path, help="as --seed, with a plan that was kept")
    parser.add_argument("--nodes", type=int, choices=(1, 3, 5), help="servers with locks (default: as the seed says)")
    parser.add_argument("--shrink", action="store_true", help="look for the smallest plan that fails in the same way")
    parser.add_argument("--keep", type=Path, help="with --shrink: a file for that plan")
    parser.add_argument("--keep-counts", action="store_true", help="write counts.json, for later campaigns")
    return parser.parse_args()


def _seeds(text: str) -> range:
    first, dots, last = text.partition("..")
    return range(int(first), int(last) + 1) if dots else range(int(first))


def _one(plan: Plan, options: argparse.Namespace) -> int:
    from tests.simulation.simulate import prepare, simulate

    prepare()
    result = simulate(plan)
    if options.shrink and result.failure is not None:
        result = shrink(result, simulate)
        if options.keep is not None:
            found.write(result.plan, options.keep)
    _show(result)
    return 0 if result.failure is None else 1


def _show(result: Result) -> None:
    for line in (*table.of_plan(result.plan), *table.of_trace(result.trace)):
        print(line)
    print(f"{result.seconds:.3f} s, {result.bodies} bodies:", result.failure or "all promises kept")


def _many(options: argparse.Namespace) -> int:
    kinds: dict[str, int] = {}

    def on_outcome(outcome: Outcome) -> None:
        if outcome.failure is not None:
            kind = kind_of(outcome.failure)
            kinds[kind] = kinds.get(kind, 0) + 1
            if kinds[kind] <= PRINTED:
                print(f"seed {outcome.seed}: {outcome.failure}", flush=True)

    figures = campaign.carry_out(
        options.seeds, jobs=options.jobs, nodes=options.nodes, minutes=options.minutes, on_outcome=on_outcome
    )
    print(figures.text())
    if options.keep_counts:
        figures.counts.keep(figures.seeds)
    # With a given number of servers, few kinds of plans are drawn.
    missed = [*figures.counts.missed(figures.seeds)] if options.nodes is None else []
    for line in missed:
        print(f"MISSED {line}")
    if options.shrink:
        _shrink_each(figures, options.nodes)
    return 1 if figures.failures or missed else 0


def _shrink_each(figures: Figures, nodes: int | None) -> None:
    """Shrink the plan of the first seed of each kind of failure."""
    from tests.simulation.simulate import prepare, simulate

    prepare()
    for kind, seeds in figures.failures.items():
        result = simulate(draw(min(seeds), nodes=nodes))
        if result.failure is not None and kind_of(result.failure) == kind:
            print()
            _show(shrink(result, simulate))


if __name__ == "__main__":
    # The order of a set of strings depends on the hash seed.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    sys.exit(main())
