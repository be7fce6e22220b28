"""`python -m tests.celery_suite`: run Celery's own tests with the stock task, then with `SingletonTask`, and compare.

The outcome of a test may differ only if README.md names the test, with the reason; and these tests must differ.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.celery_suite.suite import PARTS, Outcomes, Suite

README = Path(__file__).with_name("README.md")

#: How many runs must confirm that a test differs: some of Celery's integration tests fail now and then by themselves.
LOOKS = 3

#: A row of the table of tests that differ.
_ROW = re.compile(r"^\| `(?P<test>[^`]+)` \| (?P<reason>.+) \|$", re.MULTILINE)


def main() -> int:
    """Run what is asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.celery_suite", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; may be repeated")
    parser.add_argument("tests", nargs="*", help="instead of the parts: files or ids of Celery's tests")
    options = parser.parse_args()
    suite = Suite.ready()
    known, wrong = expected(README.read_text()), 0
    parts = {"some": options.tests} if options.tests else {name: PARTS[name] for name in options.only or PARTS}
    for name, tests in parts.items():
        stock = suite.run(f"{name}-stock", tests, exclusive=False)
        ours = suite.run(f"{name}-exclusive", tests, exclusive=True)
        differ = _confirmed(suite, name, differing(stock, ours))
        print(f"{name}, Celery {suite.version}: {_told(stock)} with Task; {_told(ours)} with SingletonTask", flush=True)
        both = [test for test, outcome in stock.items() if outcome == "failed" and ours.get(test) == "failed"]
        wrong += _report("fails with both, which says nothing", both, bad=False)
        wrong += _report("differs as README.md says", [test for test in differ if test in known], bad=False)
        wrong += _report("DIFFERS", [test for test in differ if test not in known])
        stale = [test for test in known if test in stock and test not in differ]
        wrong += _report("does NOT differ any more: take it off the list in README.md", stale)
    print(f"logs: {suite.place}")
    return 1 if wrong else 0


def expected(text: str) -> dict[str, str]:
    """The tests that may differ, and why, from the table in README.md."""
    return {row["test"]: row["reason"] for row in _ROW.finditer(text)}


def differing(stock: Outcomes, ours: Outcomes) -> list[str]:
    """The tests with another outcome, or that only one run had."""
    return [test for test in {**stock, **ours} if stock.get(test) != ours.get(test)]


def _confirmed(suite: Suite, name: str, tests: Sequence[str]) -> Sequence[str]:
    """The tests that differ each time."""
    for number in range(2, LOOKS + 1):
        if not tests:
            break
        stock = suite.run(f"{name}-stock-{number}", tests, exclusive=False)
        ours = suite.run(f"{name}-exclusive-{number}", tests, exclusive=True)
        tests = [test for test in tests if test in differing(stock, ours)]
    return tests


def _told(outcomes: Outcomes) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(Counter(outcomes.values()).items()))


def _report(heading: str, tests: Sequence[str], *, bad: bool = True) -> int:
    """Print them; returns how many are wrong."""
    for test in tests:
        print(f"  {heading}: {test}", flush=True)
    return len(tests) if bad else 0


if __name__ == "__main__":
    sys.exit(main())
