"""`python -m tests.simulation.mutants [name …] [--seeds 400] [--first 1] [--jobs 2]`: how soon each mutant is found.

With `--page docs/mutants.md`, the table is also written there, as a page of the documentation.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tests.simulation.mutants import MUTANTS

PAGE = """# Deliberate faults

`make mutants` puts each of these faults into the package, one at a time, and counts the seeds until the
[simulator](proof.md#a-simulator) reports a broken promise; {most} seeds at most. `python -m tests.simulation.mutants
--page docs/mutants.md` has written this page.

{table}
"""


def main() -> int:
    from tests.simulation.mutants.runner import report, run_all

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of mutants, or what some names contain; all by default")
    parser.add_argument("--seeds", type=int, default=400)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--page", type=Path, help="write a page of the documentation, too")
    given = parser.parse_args()
    whole = {it.name for it in MUTANTS}.intersection(given.names)
    parts = [name for name in given.names if name not in whole]
    chosen = [it for it in MUTANTS if not given.names or it.name in whole or any(part in it.name for part in parts)]
    found = run_all(chosen, first=given.first, seeds=given.seeds, jobs=given.jobs)
    print(table := report(found))
    if given.page is not None:
        given.page.write_text(PAGE.format(most=given.seeds, table=table))
    return int(any(it.failure is None and not it.mutant.unseen for it in found))


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.mutants", *sys.argv[1:]])
    sys.exit(main())
