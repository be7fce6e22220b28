"""`python -m tests.simulation.edges [name …]`: how soon a promise breaks without each of its assumptions."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from tests.simulation.beyond import BY_NAME, Assumption, draw_without
from tests.simulation.plan import draw

#: Seeds after which an assumption counts as unnecessary.
ENOUGH = 2000


class Broken(NamedTuple):
    """The result of taking an assumption away: what was seen, after how many seeds."""

    assumption: Assumption
    seeds: int
    failure: str | None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.edges", description=__doc__)
    parser.add_argument("names", nargs="*", help="of assumptions; all by default")
    parser.add_argument("--seeds", type=int, default=ENOUGH)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--search", action="store_true", help="in this process; prints JSON")
    parser.add_argument("--kept", action="store_true", help="take nothing away: nothing may be seen")
    given = parser.parse_args()
    names = given.names or [*BY_NAME]
    if given.search:
        print(json.dumps(_search(*names, given.seeds, kept=given.kept)))
        return 0
    with ThreadPoolExecutor(given.jobs) as threads:
        found = [*threads.map(partial(_found, seeds=given.seeds, kept=given.kept), names)]
    print(report(found))
    return int(any((it.failure is None) != given.kept for it in found))


def report(found: Sequence[Broken]) -> str:
    """A table in Markdown."""
    lines = ["| without | seeds | what is seen |", "|---|---|---|"]
    for assumption, seeds, failure in found:
        seen = failure.replace("|", "/") if failure is not None else "nothing"
        lines.append(f"| {assumption.without} | {seeds} | {seen} |")
    return "\n".join(lines)


def _found(name: str, *, seeds: int, kept: bool) -> Broken:
    """Search in a separate process, since a simulation changes its process."""
    command = [sys.executable, "-m", "tests.simulation.edges", name, "--search", "--seeds", str(seeds)]
    command += ["--kept"] if kept else []
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = Broken(BY_NAME[name], *json.loads(said))
    print(f"{name}: {found.seeds}, {found.failure}", file=sys.stderr, flush=True)
    return found


def _search(name: str, seeds: int, *, kept: bool) -> tuple[int, str | None]:
    from tests.simulation.simulate import prepare, simulate

    prepare()
    assumption = BY_NAME[name]
    for seed in range(seeds):
        as_drawn = draw(seed, nodes=assumption.nodes, kind=assumption.kind)
        failure = simulate(as_drawn if kept else draw_without(assumption, seed)).failure
        if failure is not None:
            return seed + 1, failure
    return seeds, None


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.edges", *sys.argv[1:]])
    sys.exit(main())
