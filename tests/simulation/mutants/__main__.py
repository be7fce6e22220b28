"""`python -m tests.simulation.mutants [name …] [--seeds 400] [--first 1] [--jobs 2]`: how soon each mutant is found."""

from __future__ import annotations

import argparse
import os
import sys

from tests.simulation.mutants import MUTANTS


def main() -> int:
    from tests.simulation.mutants.runner import report, run_all

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of mutants, or what some names contain; all by default")
    parser.add_argument("--seeds", type=int, default=400)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    whole = {it.name for it in MUTANTS}.intersection(given.names)
    parts = [name for name in given.names if name not in whole]
    chosen = [it for it in MUTANTS if not given.names or it.name in whole or any(part in it.name for part in parts)]
    found = run_all(chosen, first=given.first, seeds=given.seeds, jobs=given.jobs)
    print(report(found))
    return int(any(it.failure is None and not it.mutant.unseen for it in found))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.mutants", *sys.argv[1:]])
    sys.exit(main())
