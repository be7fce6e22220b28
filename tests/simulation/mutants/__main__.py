"""`python -m tests.simulation.mutants [name …] [--base COMMIT] [--seeds 400] [--jobs 2]`: which seed finds each mutant.

The seed that found a mutant is tried first in the next run: `seeds.json` keeps it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.simulation.mutants import MUTANTS, SEEDS
from tests.simulation.mutants.mutant import Mutant

_ROOT = Path(__file__).resolve().parents[3]


def main() -> int:
    from tests.simulation.mutants.runner import report, run_all

    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="what the names or files of mutants contain; all by default")
    parser.add_argument("--base", help="only mutants of files that differ from this commit, and new mutants")
    parser.add_argument("--seeds", type=int, default=400)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    known: dict[str, int] = json.loads(SEEDS.read_text())
    chosen = [it for it in MUTANTS if not given.names or any(part in f"{it.name} {it.file}" for part in given.names)]
    if not chosen:
        parser.error("no mutant has such a name or file")
    if given.base is not None:
        chosen = [it for it in chosen if it.name not in known or _differs(it, given.base)]
    for mutant in chosen:
        mutant.edit(mutant.path, (_ROOT / mutant.path).read_text())
    found = run_all(chosen, seeds=given.seeds, jobs=given.jobs, known=known)
    print(report(found))
    seen = {it.mutant.name: it.seed for it in found if it.failure is not None}
    for name, seed in seen.items():
        if known.get(name, seed) != seed:
            print(f"{name}: seed {seed} finds it, seed {known[name]} does not any more")
    _keep({**known, **seen})
    return int(len(seen) < len(found))


def _differs(mutant: Mutant, commit: str) -> bool:
    shown = subprocess.run(["git", "show", f"{commit}:{mutant.path}"], cwd=_ROOT, capture_output=True, check=False)
    return shown.stdout != (_ROOT / mutant.path).read_bytes()


def _keep(seeds: Mapping[str, int]) -> None:
    kept = {it.name: seeds[it.name] for it in MUTANTS if it.name in seeds}
    SEEDS.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    # The order of a set of strings depends on the hash seed.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.mutants", *sys.argv[1:]])
    sys.exit(main())
