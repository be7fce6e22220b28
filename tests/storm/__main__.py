"""A storm on real processes: `python -m tests.storm --minutes 5 --seed 1`."""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from tests.storm.judge import summary
from tests.storm.mutants import MUTANTS
from tests.storm.run import storm
from tests.storm.scene import PLACES
from tests.storm.sender import LOADS
from tests.storm.soak import soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="until the calm (5)")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32), help="decides what goes wrong")
    parser.add_argument("--on", choices=PLACES, default="server", help="where the locks are (server)")
    parser.add_argument("--load", choices=LOADS, default="mixed", help="what is sent (mixed)")
    parser.add_argument("--kinds", default="", help="of faults: what their names begin with; by default all")
    parser.add_argument("--soak", action="store_true", help="no faults, but a look at what the work leaves behind")
    parser.add_argument("--mutant", choices=MUTANTS, default="", help="a broken build of the package")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.soak:
            return min(len(soak(Path(folder), options.minutes)), 1)
        chosen = {"place": options.on, "load": options.load, "mutant": options.mutant, "kinds": options.kinds}
        lines, found = storm(Path(folder), options.seed, options.minutes, **chosen)
    print(f"{options.on}, {options.load}, seed {options.seed}, {options.minutes:g} min: {summary(lines, found)}")
    return min(len(found), 1)


if __name__ == "__main__":
    raise SystemExit(main())
