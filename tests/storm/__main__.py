"""A storm on real processes: `python -m tests.storm --minutes 5 --seed 1 --report storm.md`."""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.storm.beats import storm_of_beats
from tests.storm.places import PLACES
from tests.storm.report import page, ticks, together
from tests.storm.run import storm
from tests.storm.scene import TTL
from tests.storm.schedulers import SCHEDULERS

#: Ways to lock that share one simple task: their names for `--package`, and in the tables of the benchmarks.
WAYS = {
    "plain": "plain `Task`",
    "redis.lock": "`redis.lock` in the task",
    "celery-singleton": "celery-singleton",
    "celery-singleton-expiry": "celery-singleton, `lock_expiry`",
    "celery-once": "celery-once",
    "celery-heimdall": "celery-heimdall",
    "this": "`SingletonTask`",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of each storm, until the calm (5)")
    parser.add_argument("--seed", type=int, help="decides what is sent and what goes wrong; a random one by default")
    parser.add_argument(
        "--on",
        choices=PLACES,
        action="append",
        help="where the locks are; one after another (all; of a package: server)",
    )
    parser.add_argument(
        "--package",
        choices=WAYS,
        default="",
        help="by which one simple task locks; by default ours, and tasks of every kind",
    )
    parser.add_argument(
        "--beat",
        choices=SCHEDULERS,
        action="append",
        help="only two beats, with one server: by which scheduler; one after another",
    )
    parser.add_argument("--mutant", default="", help="of this package, as named in tests/storm/mutants.py")
    parser.add_argument("--keep", type=Path, help="directory for the history and the logs")
    parser.add_argument("--report", type=Path, help="file for the tables")
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    name = f"{options.package}, " if options.package else ""
    if options.beat:
        return of_beats(options, seed)
    verdicts, pages = [], []
    for place in options.on or (["server"] if options.package else PLACES):
        with _directory(options, place) as directory:
            chosen = {"place": place, "package": WAYS.get(options.package, ""), "mutant": options.mutant}
            verdicts.append(storm(directory, seed, options.minutes, **chosen))
        pages.append(page(verdicts[-1], f"{name}{place}, seed {seed}, {options.minutes:g} min", TTL))
        print(pages[-1], flush=True)
    if len(verdicts) > 1:
        pages.append(page(together(verdicts), f"{name}all of them", TTL))
        print(pages[-1], flush=True)
    if options.report:
        options.report.write_text("\n\n".join(pages) + "\n")
    return min(sum(len(verdict.broken) for verdict in verdicts), 1)


def of_beats(options: argparse.Namespace, seed: int) -> int:
    """Run the storm of beats; 1 if some scheduler sent a tick twice that is not one message, or did not go on."""
    counted = {}
    for name in options.beat:
        with _directory(options, name) as directory:
            counted[SCHEDULERS[name].title] = storm_of_beats(directory, seed, options.minutes, name)
    whole = f"### beats, seed {seed}, {options.minutes:g} min\n\n{ticks(counted)}"
    print(whole, flush=True)
    if options.report:
        options.report.write_text(whole + "\n")
    return int(any(one.twice > one.repeated or not one.goes_on for one in counted.values()))


@contextmanager
def _directory(options: argparse.Namespace, name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        directory = (options.keep or Path(folder)) / name
        directory.mkdir(parents=True)
        yield directory


if __name__ == "__main__":
    raise SystemExit(main())
