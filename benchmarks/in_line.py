"""How soon messages for one lock are done, in which order, and how this affects other work."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import Result, Rounds, Row, Table, percentile, wait_until
from benchmarks.processes import QUIET, celery
from tests.redis_server import RedisServer

WORKERS, CHILDREN = 2, 2

#: How many messages for one lock, and seconds that each holds it.
MESSAGES, SECONDS = 60, 0.05

#: How many messages for one lock beside other work; seconds for which that work is watched, and between its messages.
MANY, WATCHED, EVERY = 1000, 8.0, 0.05

#: Seconds for workers to start, or to finish.
LIMIT = 300.0

IDEAL = "one after the other"


class Drained(NamedTuple):
    """Seconds from the first run to the end of the last; seconds between two runs; the share of pairs out of order."""

    seconds: float
    gaps: Sequence[float]
    inversions: float


def run(*, quick: bool = False) -> Result:
    """Two workers on one Redis, which is the lock server as well."""
    rounds = 2 if quick else 7
    with _workers() as file:
        drained = {name: [_drain(file, name) for _ in range(rounds)] for name in ("retry", "lock_wait")}
        alone = _beside(file, 0)
        many = _beside(file, MANY)
    ideal = [MESSAGES * SECONDS] * rounds
    figures = {IDEAL: ideal, **{name: [one.seconds for one in found] for name, found in drained.items()}}

    def columns(name: str) -> dict[str, str]:
        if name == IDEAL:
            return {}
        gaps = sorted(gap for one in drained[name] for gap in one.gaps)
        return {
            "hand-over p50 ms": f"{statistics.median(gaps) * 1000:.1f}",
            "p90 ms": f"{percentile(gaps, 90) * 1000:.1f}",
            "pairs out of order": f"{statistics.median(one.inversions for one in drained[name]):.1%}",
        }

    tables = [
        Rounds(IDEAL, figures, ideal).table(f"{MESSAGES} messages of {SECONDS * 1000:g} ms for one lock", columns),
        Table("Other work", "", [Row("alone", None, alone), Row(f"beside {MANY:,} messages for one lock", None, many)]),
    ]
    notes = [
        f"{WORKERS} prefork workers with {CHILDREN} processes each; a copy that waits with `lock_wait` occupies one.",
        f"Other work: a message every {EVERY * 1000:g} ms for {WATCHED:g} s, timed from sending to its body.",
    ]
    return Result("in_line", "Waiting in line", tables, notes)


@contextmanager
def _workers() -> Iterator[Path]:
    """Two ready workers, and the file to which their tasks write."""
    with RedisServer() as server, tempfile.TemporaryDirectory() as directory, ExitStack() as exits:
        file = Path(directory) / "ran"
        file.touch()
        os.environ.update({"BENCHMARK_BROKER": server.url, "BENCHMARK_FILE": str(file)})
        for number in range(WORKERS):
            command = ("worker", "-n", f"{number}@benchmark", "-c", str(CHILDREN), *QUIET)
            log = Path(directory) / f"log{number}"
            exits.enter_context(celery("benchmarks.in_line_app", *command, log=log, environment={}))
        from benchmarks.in_line_app import app  # Imported only now, when the broker is known.

        wait_until(lambda: len(app.control.ping(timeout=1)) == WORKERS, LIMIT, "the workers do not answer")
        yield file


def _drain(file: Path, name: str) -> Drained:
    from benchmarks.in_line_app import TASKS

    os.truncate(file, 0)
    for number in range(MESSAGES):
        TASKS[name].delay("drained", number, SECONDS)
    wait_until(lambda: len(_ran(file)) == MESSAGES, LIMIT, f"{name}: {MESSAGES} tasks have not run")
    ran = sorted(_ran(file), key=lambda it: float(it["began"]))
    gaps = [after["began"] - before["ended"] for before, after in itertools.pairwise(ran)]
    pairs = [*itertools.combinations([it["number"] for it in ran], 2)]
    return Drained(ran[-1]["ended"] - ran[0]["began"], gaps, sum(one > other for one, other in pairs) / len(pairs))


def _beside(file: Path, many: int) -> dict[str, str]:
    """How late other work is, beside `many` messages for one lock."""
    from benchmarks.in_line_app import TASKS, app, beside

    os.truncate(file, 0)
    for number in range(many):
        TASKS["retry"].delay("many", number, SECONDS)
    if many:  # All of them have met the lock once.
        wait_until(partial(_are_first_tries_over, app), LIMIT, "the messages do not go")
    ends = time.time() + WATCHED
    sent = 0
    while time.time() < ends:
        beside.delay(time.time())
        sent += 1
        time.sleep(EVERY)
    wait_until(lambda: len(_late(file)) == sent, LIMIT, "other work has not run")
    late = sorted(_late(file))
    through = len(_ran(file))
    app.control.purge()
    return {
        "p50 ms": f"{statistics.median(late) * 1000:.1f}",
        "p99 ms": f"{percentile(late, 99) * 1000:.1f}",
        "of the many, run meanwhile": str(through) if many else "",
    }


def _are_first_tries_over(app: Any) -> bool:
    with app.connection_for_read() as connection:
        try:
            return int(connection.default_channel.queue_declare("celery", passive=True).message_count) == 0
        except connection.channel_errors:  # On Redis, an empty queue does not exist.
            return True


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _ran(file: Path) -> list[dict[str, Any]]:
    return [line for line in _lines(file) if line["key"] != "beside"]


def _late(file: Path) -> list[float]:
    return [line["late"] for line in _lines(file) if line["key"] == "beside"]
