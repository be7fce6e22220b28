"""How soon a waiter gets the lock after a release, and what waiting costs meanwhile."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

from benchmarks.contestants import TOKEN, WAITING, Maker
from benchmarks.measure import Result, commands, measured, percentile
from benchmarks.processes import Child, cpu_of
from benchmarks.schemes import Lock
from tests.redis_server import RedisServer

#: Seconds that a waiter waits at most: longer than any of these benchmarks takes.
WAIT = 25.0

#: Seconds until a single waiter waits, and until a crowd does; and seconds over which the releases are spread, for
#: locks that look every 0.1 s.
ONE_BLOCKED, CROWD_BLOCKED, PHASE = 0.04, 0.5, 0.1

PROCESSES, THREADS = 5, 10
CROWD = PROCESSES * THREADS


class Seen(NamedTuple):
    """Commands and CPU seconds while all wait; seconds and commands from the release until each has had the lock."""

    waiting: int
    cpu: float
    drained: float
    commands: int


def run(*, quick: bool = False) -> Result:
    """Measure one waiter in another process; then 50 waiters in five processes."""
    (rounds, each), (crowds, seconds) = ((4, 4), (3, 5.0)) if quick else ((10, 7), (7, 8.0))
    with RedisServer() as server, ExitStack() as exits:
        waiters = [exits.enter_context(Child(wait_when_told, server.url)) for _ in range(PROCESSES)]
        makers = {name: opener([server.url]) for name, opener in WAITING.items()}

        def one(name: str) -> float:
            blocked = ONE_BLOCKED + random.uniform(0, PHASE)
            return see(server, makers[name], name, waiters[:1], 1, blocked).drained

        def crowd(name: str, seconds: float = 0.0) -> Seen:
            return see(server, makers[name], name, waiters, THREADS, CROWD_BLOCKED, seconds)

        times: dict[str, list[float]] = {name: [] for name in WAITING}

        def turn(name: str) -> tuple[float]:
            times[name] += (taken := [one(name) for _ in range(each)])
            return (statistics.median(taken),)

        def crowded(name: str) -> tuple[float, int]:
            seen = crowd(name)
            return seen.drained, seen.commands

        for name in WAITING:
            one(name)
        (alone,) = measured(TOKEN, rounds, {name: partial(turn, name) for name in WAITING})
        # Long enough to see what is repeated every few seconds; a rate, which needs no rounds.
        waits = {name: crowd(name, seconds) for name in WAITING}
        many, asked = measured(TOKEN, crowds, {name: partial(crowded, name) for name in WAITING})
    tables = [
        alone.table(
            f"One waiter, {rounds * each} hand-overs",
            lambda name: {
                "p50 ms": f"{statistics.median(times[name]) * 1000:.2f}",
                "p99 ms": f"{percentile(sorted(times[name]), 99) * 1000:.2f}",
            },
        ),
        many.table(
            f"{CROWD} waiters, until each has had the lock once",
            lambda name: {
                "ms": f"{many.median(name) * 1000:.0f}",
                "server commands meanwhile": f"{asked.median(name):.0f}",
                "commands/s per blocked waiter": f"{waits[name].waiting / seconds / CROWD:.2f}",
                "blocked waiters' share of a core": f"{waits[name].cpu / seconds:.1%}",
            },
        ),
    ]
    notes = [
        f'"{TOKEN}" is the least that a wake-up through Redis costs; it is not a lock.',
        "The time is from before the release in one process to after the acquire in another (CLOCK_MONOTONIC).",
        f"The crowd: {CROWD} threads in {PROCESSES} processes, each taking the lock once and freeing it at once.",
        "Server commands include those within scripts.",
        "python-redis-lock gets a client without socket_timeout: with the 5 s of redis-py 8, waiting ends in a"
        " TimeoutError.",
    ]
    return Result("hand_over", "Hand-over to a waiter", tables, notes)


def see(
    server: RedisServer,
    make: Maker,
    name: str,
    waiters: Sequence[Child],
    threads: int,
    blocked: float,
    seconds: float = 0.0,
) -> Seen:
    """Hold a lock while others wait for it, look for `seconds` once all are blocked, and release."""
    lock = make(f"{threads}:{name}")
    assert lock.acquire(0.2), name
    for waiter in waiters:
        waiter.ask((name, f"{threads}:{name}", threads))
    time.sleep(blocked)
    with server.client() as client:
        begun, used = commands(client), sum(cpu_of(waiter.process.pid) for waiter in waiters)
        time.sleep(seconds)
        before, used = commands(client), sum(cpu_of(waiter.process.pid) for waiter in waiters) - used
        released_at = time.monotonic()
        lock.release()
        acquired_at = [at for waiter in waiters for at in waiter.pipe.recv()]
        assert len(acquired_at) == len(waiters) * threads, name
        # One of the commands was the look itself.
        return Seen(before - begun - 1, used, max(acquired_at) - released_at, commands(client) - before - 1)


def wait_when_told(orders: Connection, url: str) -> None:
    """In a waiter's process: threads acquire the requested lock, release it, and report when they had it."""
    makers = {name: opener([url]) for name, opener in WAITING.items()}
    while True:
        name, key, count = orders.recv()
        acquired_at: list[float] = []
        locks = [makers[name](key) for _ in range(count)]
        threads = [threading.Thread(target=_take_once, args=(lock, acquired_at)) for lock in locks]
        for thread in threads:
            thread.start()
        orders.send("waiting")
        for thread in threads:
            thread.join()
        orders.send(acquired_at)


def _take_once(lock: Lock, acquired_at: list[float]) -> None:
    if lock.acquire(WAIT):
        acquired_at.append(time.monotonic())
        lock.release()
