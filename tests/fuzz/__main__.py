"""`make fuzz`: a number of cases for all targets.

python -m tests.fuzz [--cases N] [--seed N]     this many cases, divided among the targets
python -m tests.fuzz TARGET --data HEX          repeat one case
"""

from __future__ import annotations

import argparse
import secrets
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.fuzz.running import Found, once, part_of, quiet
from tests.fuzz.targets import TARGETS

#: Processes, and the parts into which each target is divided.
JOBS, PARTS = 2, 4


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", nargs="?", choices=TARGETS)
    parser.add_argument("--cases", type=int, default=500_000)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32))
    parser.add_argument("--data", type=bytes.fromhex)
    asked = parser.parse_args()
    if asked.data is not None:
        return _again(asked.target, asked.data)
    shares = {name: share for name, (_, share) in TARGETS.items() if asked.target in (None, name)}
    total, faults = sum(shares.values()), 0
    with ProcessPoolExecutor(JOBS, mp_context=get_context("forkserver")) as pool:
        parts = {
            name: [
                pool.submit(part_of, name, max(asked.cases * share // total // PARTS, 1), asked.seed + part)
                for part in range(PARTS)
            ]
            for name, share in shares.items()
        }
        for name, running in parts.items():
            ended = [part.result() for part in running]
            cases, seconds = sum(part[0] for part in ended), sum(part[1] for part in ended)
            found = {part[2] for part in ended if part[2]}
            faults += len(found)
            print(f"{name:<10}{cases:>10} cases in {seconds:7.1f} s, {len(found)} faults", flush=True)
            for text in sorted(found):
                print(text, flush=True)
    print(f"seed {asked.seed}")
    return 1 if faults else 0


def _again(name: str, data: bytes) -> int:
    quiet()
    with TARGETS[name][0]() as case:
        try:
            once(name, case, data)
        except Found as error:
            print(error)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
