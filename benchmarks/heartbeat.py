"""What it costs to hold many locks at once, each renewed before it ends."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection

import psutil

from benchmarks import ours, peers
from benchmarks.locks import TTL
from benchmarks.measure import Result, Rounds, Row, Skipped, Table
from celery_singleton_lock.testing import RedisServer

THREADS = "python-redis-lock, auto_renewal"

#: Holds so many locks on the server at this URL; returns what tells how many of them are still ours.
Hold = Callable[[str, int], Callable[[], int]]

#: Each with the share of the number of locks that it holds: one thread per lock is no good for thousands.
CONTESTANTS: Mapping[str, tuple[Hold, float]] = {
    THREADS: (peers.hold_renewed, 0.03),
    "ours: as a task locks": (ours.hold_leases, 1.0),
    "ours: Lock": (ours.hold_locks, 1.0),
    "an idle process": (peers.hold_nothing, 0.0),
}

_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class _Start:
    """What a process says when it holds its locks."""

    count: int
    threads: int
    memory: int


def run(*, quick: bool = False) -> Result:
    """All processes side by side, over the same seconds: two thirds of the ttl, in which each lock is renewed."""
    count, rounds = (2000, 1) if quick else (10_000, 2)
    # Every one is renewed after a third of the ttl, or after two of them: both fit.
    window = TTL * 2 / 3
    with RedisServer() as server:
        holders = {
            name: _Holder(server.url_of(number), name, round(count * share))
            for number, (name, (_, share)) in enumerate(CONTESTANTS.items())
        }
        try:
            return _measure(holders, rounds, window)
        finally:
            for holder in holders.values():
                holder.process.kill()


def _measure(holders: Mapping[str, _Holder], rounds: int, window: float) -> Result:
    skipped = []
    starts: dict[str, _Start] = {}
    for name, holder in holders.items():
        said = holder.pipe.recv()
        if isinstance(said, str):
            skipped.append(Row(name, None, {"skipped": said}))
        else:
            starts[name] = said
    measured, shares = Rounds(THREADS), {name: [] for name in starts}
    for _ in range(rounds):
        before = {name: holders[name].cpu() for name in starts}
        time.sleep(window)
        for name, start in starts.items():
            used = holders[name].cpu() - before[name]
            shares[name].append(used / window)
            measured.figures.setdefault(name, []).append(used / max(start.count, 1))
    rows = []
    for name, start in starts.items():
        held = holders[name].held()
        columns = {
            "locks": f"{start.count:,}",
            "still held": f"{held:,}",
            "threads": str(start.threads),
            "share of a core": f"{sum(shares[name]) / rounds:.2%}",
            "kB per lock": f"{start.memory / start.count / 1000:.1f}" if start.count else "",
        }
        rows.append(Row(name, measured.ratio(name) if start.count else None, columns))
    notes = [
        f"ttl {TTL:g} s; windows of {window:g} s: {rounds}; all processes at the same time, each in its own database.",
        f'"{THREADS}" holds 3 % as many: it has a thread per lock. The ratio is of CPU seconds per lock.',
        "Ours renews each lock after a third of the ttl, python-redis-lock after two. No second turn of the baseline.",
        "Memory is what the process grew by while it took its locks, divided by their number.",
    ]
    return Result(
        "heartbeat",
        "Many locks held and renewed",
        [Table("CPU time to keep one lock", THREADS, [*rows, *skipped])],
        notes,
    )


class _Holder:
    """A process that holds locks."""

    def __init__(self, url: str, name: str, count: int) -> None:
        self.pipe, theirs = _spawn.Pipe()
        self.process = _spawn.Process(target=_hold, args=(url, name, count, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def cpu(self) -> float:
        """Seconds of CPU time that it has used: asked of itself, since others see it in steps of 10 ms."""
        self.pipe.send("cpu")
        used: float = self.pipe.recv()
        return used

    def held(self) -> int:
        """How many locks it still holds, and keeps."""
        self.pipe.send("held")
        count: int = self.pipe.recv()
        return count


def _hold(url: str, name: str, count: int, pipe: Connection) -> None:
    hold, _ = CONTESTANTS[name]
    process = psutil.Process(os.getpid())
    try:
        before = process.memory_info().rss
        held = hold(url, count)
    except Skipped as reason:
        pipe.send(str(reason))
        return
    pipe.send(_Start(count, threading.active_count(), process.memory_info().rss - before))
    while True:
        pipe.send(time.process_time() if pipe.recv() == "cpu" else held())
