"""`python -m tests.model`: check the models exhaustively, and show what goes wrong in each broken variant."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.model.checks import BROKEN, SOUND
from tests.model.spin import Check, Found, NotChecked, is_here, run


def main() -> int:
    """Run the checks; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("--only", default="", help="those whose name has this in it")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once")
    options = parser.parse_args()
    if not is_here():
        print("Spin is not here: apt-get install spin gcc")
        return 2
    checks = [check for check in (*SOUND, *BROKEN) if options.only in check.name]
    with ThreadPoolExecutor(options.jobs) as pool:
        right = [_report(check, found) for check, found in zip(checks, pool.map(_run, checks), strict=True)]
    print(f"{right.count(True)} of {len(checks)} as they should be")
    return 0 if all(right) else 1


def _run(check: Check) -> Found | NotChecked:
    try:
        return run(check)
    except NotChecked as error:
        return error


def _report(check: Check, found: Found | NotChecked) -> bool:
    kind = "liveness" if check.liveness else "safety"
    print(f"\n{check.model}, {kind}: {check.about} ({' '.join(check.switches) or 'as it is'})")
    if isinstance(found, NotChecked):
        print(f"  NOT CHECKED: {found}", flush=True)
        return False
    print(f"  {found.states:,} states, {found.seconds:.1f} s, {found.megabytes:.0f} MB, errors: {found.errors}")
    for line in found.trace:
        print(f"    {line}")
    is_right = bool(found.errors) == check.broken
    if not is_right:
        print("  WRONG: " + ("nothing was found" if check.broken else "this must not be"))
    sys.stdout.flush()
    return is_right


if __name__ == "__main__":
    sys.exit(main())
