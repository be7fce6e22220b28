"""`python -m tests.mutation [--count 150] [--seed 1]`: the share of random changes that some test notices."""

from __future__ import annotations

import argparse
import os
import random
import sys

from tests.mutation.files import changes


def main() -> int:
    from tests.mutation.trial import tested
    from tests.simulation.mutants.runner import run_all

    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--count", type=int, default=150, help="of changes")
    parser.add_argument("--seed", type=int, default=1, help="decides which")
    parser.add_argument("--seeds", type=int, default=60, help="that the simulator tries for each")
    parser.add_argument("--only", default="", help="those whose file or rule has this in it")
    parser.add_argument("--tests", nargs="*", default=["tests/unit", "tests/contract"], help="for what it does not see")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    possible = [change for change in changes() if given.only in change.name]
    drawn = random.Random(given.seed).sample(possible, min(given.count, len(possible)))
    simulated = run_all(drawn, seeds=given.seeds, jobs=given.jobs)  # type: ignore[arg-type]
    unseen = [found.mutant for found in simulated if found.failure is None]
    print(f"{len(drawn)} of {len(possible)} changes; the simulator sees {len(drawn) - len(unseen)}", flush=True)
    left = 0
    for change, failed in tested(unseen, given.tests, jobs=given.jobs):  # type: ignore[arg-type]
        left += not failed
        print(f"{'tests' if failed else 'NOT SEEN'}: {change.name} {failed}", flush=True)
    print(f"{len(drawn) - left} of {len(drawn)} are seen ({(len(drawn) - left) / len(drawn):.1%})")
    return 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.mutation", *sys.argv[1:]])
    sys.exit(main())
