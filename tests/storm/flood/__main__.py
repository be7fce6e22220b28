"""A flood of jobs that are locked when sent, and its verdict: `python -m tests.storm.flood --report flood.md`."""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from celery_singleton_lock.options.rules import SCOPES
from tests.storm.flood.flood import Plan, flood
from tests.storm.flood.report import Row, tables

#: Seconds under `until_expired`, and for which a lost message keeps others out if processes are killed: no longer than
#: an unconfirmed lock lasts, so that the judge knows how long each lock lasts.
EXPIRED_TTL, QUEUE_TTL = 30.0, 20.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sends", type=int, default=10_000, help="for each scope (10,000)")
    parser.add_argument("--jobs", type=int, default=100, help="of each scope (100)")
    parser.add_argument("--scope", choices=SCOPES, action="append", help="one after another (all)")
    parser.add_argument("--only", choices=("calm", "deadly"), help="by default both: nobody is killed, and many are")
    parser.add_argument(
        "--seed", type=int, help="decides the order, and which process is killed when; a random one by default"
    )
    parser.add_argument("--keep", type=Path, help="directory for the histories and the logs")
    parser.add_argument("--report", type=Path, help="file for the tables")
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    rows = []
    for is_deadly in (False, True):
        if options.only not in (None, "deadly" if is_deadly else "calm"):
            continue
        for scope in options.scope or SCOPES:
            plan = _plan([scope], options.sends, options.jobs, is_deadly)
            name = f"{scope}-{'deadly' if is_deadly else 'calm'}"
            print(f"{name}, seed {seed}", file=sys.stderr)
            with tempfile.TemporaryDirectory() as folder:
                directory = (options.keep or Path(folder)) / name
                directory.mkdir(parents=True)
                rows.append(Row(scope, plan, flood(plan, directory, seed, lambda text: print(text, file=sys.stderr))))
    shown = f"{tables(rows)}\n\n(seed {seed})"
    print(shown)
    if options.report:
        options.report.write_text(f"{shown}\n")
    return min(sum(len(row.verdict.broken) for row in rows), 1)


def _plan(scopes: Sequence[str], sends: int, jobs: int, is_deadly: bool) -> Plan:
    if is_deadly:
        return Plan(scopes, sends, jobs, is_deadly, expired_ttl=QUEUE_TTL, queue_ttl=QUEUE_TTL)
    return Plan(scopes, sends, jobs, is_deadly, expired_ttl=EXPIRED_TTL)


if __name__ == "__main__":
    raise SystemExit(main())
