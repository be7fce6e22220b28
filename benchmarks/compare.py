"""`python -m benchmarks.compare [BASE] [--quick]`: what this tree costs, compared with another commit.

The same code (`probe.py`) measures both, in a process each, in turns in short rounds; see `measure.py`. Without
BASE, the other commit is where this branch left main, or else the previous one. Nothing is asserted: the reader of the
table decides.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import Rounds, Spread, measured
from benchmarks.report import times
from tests.redis_server import RedisServer

ROOT, PACKAGE, PROBE = Path(__file__).parents[1], "celery_singleton_lock", Path(__file__).with_name("probe.py")

#: How both are named in the table.
BASE, THIS = "base", "this"

#: Rounds, in each of which the base is measured twice, and the seconds after which no further round begins.
ROUNDS, SECONDS = 60, 600.0
QUICK_ROUNDS, QUICK_SECONDS = 12, 45.0

#: With fewer rounds than this, chance cannot be judged.
ENOUGH = 5

#: By how much a median has to differ from its base to be reported, beyond what noise explains.
MATTERS = 0.03


class NoHistory(Exception):
    """There is nothing to compare with."""


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("base", nargs="?", default="", help="a commit, branch or tag")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, in a minute at most")
    options = parser.parse_args()
    try:
        commit = _commit(options.base)
    except NoHistory as error:
        if options.base:
            parser.error(str(error))
        print(f"nothing to compare with: {error}")
        return
    print(f"base: {_git('log', '-1', '--format=%h %s', commit)}\nthis: {_this()}\n", flush=True)
    with _checked_out(commit) as tree, _probe(tree) as base, _probe(ROOT) as this:
        for side, failed in ((BASE, base.failed), (THIS, this.failed)):
            for name, why in failed.items():
                print(f"{side} cannot be asked for {name!r}: {why.strip().splitlines()[-1]}\n", flush=True)
        rounds, seconds = (QUICK_ROUNDS, QUICK_SECONDS) if options.quick else (ROUNDS, SECONDS)
        print(table(compared(base, this, rounds, until=time.monotonic() + seconds)))


def compared(base: Probe, this: Probe, rounds: int, *, until: float = math.inf) -> Mapping[str, Rounds]:
    """The figures that both sides have."""
    also = this.costs()
    names = [name for name in base.costs() if name in also]
    turns = {BASE: lambda: _in_order(base, names), THIS: lambda: _in_order(this, names)}
    return dict(zip(names, measured(BASE, rounds, turns, until=until), strict=True))


def table(figures: Mapping[str, Rounds]) -> str:
    """One line for each figure, in columns."""
    lines = [("", BASE, THIS, f"× {BASE}", "10 % – 90 %", f"{BASE} to itself", "")]
    for name, found in figures.items():
        ratio, noise, rounds = found.ratio(THIS), found.ratio(BASE), len(found.figures[BASE])
        said = judged(ratio, noise) if rounds >= ENOUGH else f"{rounds} of the {ENOUGH} rounds needed"
        medians = (
            f"{found.median(side):.3g}" if found.median(side) < 100 else f"{found.median(side):.0f}"
            for side in (BASE, THIS)
        )
        lines.append((name, *medians, times(ratio.median), _between(ratio), _between(noise), said))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:-1], widths[1:-1]), line[-1]]).rstrip()
        for line in lines
    )


def judged(ratio: Spread, noise: Spread) -> str:
    """Whether this side is slower or faster by more than chance explains; otherwise an empty text."""
    if ratio.median > 1 + MATTERS and ratio.low > 1 and ratio.median > noise.high:
        return "slower"
    if ratio.median < 1 - MATTERS and ratio.high < 1 and ratio.median < noise.low:
        return "faster"
    return ""


class Probe:
    """A process that measures one side."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        #: What this side cannot measure, and why.
        self.failed: Mapping[str, str] = self._heard()["failed"]

    def costs(self) -> Mapping[str, float]:
        """Measure now."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        return self._heard()

    def _heard(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"a probe has ended, with status {self._process.wait()}")
        return json.loads(line)


@contextmanager
def _probe(tree: Path) -> Iterator[Probe]:
    """A probe of the package in this directory, on its own server."""
    with RedisServer() as server:
        process = subprocess.Popen(
            [sys.executable, str(PROBE), server.url],
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            yield Probe(process)
        finally:
            process.kill()
            process.communicate()


@contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    """The package as it was at that commit."""
    packed = subprocess.run(["git", "archive", commit, PACKAGE], cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as directory, tarfile.open(fileobj=io.BytesIO(packed)) as files:
        files.extractall(directory, filter="data")
        yield Path(directory)


def _commit(base: str) -> str:
    """The commit to compare with."""
    head = _git("rev-parse", "HEAD")
    if base:
        return _git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}")
    for main in ("origin/main", "main"):
        try:
            left = _git("merge-base", "HEAD", main)
        except NoHistory:
            continue
        if left != head:
            return left
    # This is main itself: compare uncommitted changes with the last commit, or the last commit with the previous one.
    return head if _git("status", "--porcelain", "--", PACKAGE) else _git("rev-parse", "--verify", "--quiet", "HEAD~1")


def _this() -> str:
    changed = " and uncommitted changes" if _git("status", "--porcelain", "--", PACKAGE) else ""
    return _git("log", "-1", "--format=%h %s") + changed


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoHistory(
            f"git {' '.join(arguments)}: {getattr(error, 'stderr', error) or 'there is none such'}"
        ) from None
    return done.stdout.strip()


def _in_order(probe: Probe, names: Sequence[str]) -> list[float]:
    costs = probe.costs()
    return [costs[name] for name in names]


def _between(spread: Spread) -> str:
    return f"{times(spread.low)} – {times(spread.high)}"


if __name__ == "__main__":
    main()
