"""How soon a waiter gets the lock after a release, and what waiting costs meanwhile."""

from __future__ import annotations

import multiprocessing
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from benchmarks import ours, peers
from benchmarks.locks import Maker, Opener
from benchmarks.measure import Result, Rounds, Row, Table, made, percentile
from celery_singleton_lock.testing import RedisServer

TOKEN = "bare BLPOP of a token"

CONTESTANTS: Mapping[str, Opener] = {
    TOKEN: peers.list_token,
    "ours: as a task locks": ours.store,
    "ours: Lock": ours.lock,
    "redis-py Lock": peers.redis_py,
    "python-redis-lock": peers.python_redis_lock,
}

#: Seconds that a waiter waits at most: no less than any of these takes.
WAIT = 25.0

#: Seconds after which a waiter that was told to wait does so.
BLOCKED_AFTER = 0.04

#: Seconds over which the releases are spread, for those that look every 0.1 s.
PHASE = 0.1

PROCESSES, THREADS = 5, 10
CROWD = PROCESSES * THREADS

_spawn = multiprocessing.get_context("spawn")


def run(*, quick: bool = False) -> Result:
    """One waiter in another process; then 50 waiters in five."""
    with RedisServer() as server:
        makers, skipped = made({name: lambda opener=opener: opener([server.url]) for name, opener in open_all()})
        one = _one_waiter(server, makers, rounds=4 if quick else 10, each=4 if quick else 7)
        crowd = _crowd(server, makers, rounds=3 if quick else 7, seconds=5.0 if quick else 8.0)
    tables = [Table(table.title, table.baseline, [*table.rows, *skipped]) for table in (one, crowd)]
    notes = [
        f'"{TOKEN}" is what a wake-up through Redis costs at least; it is no lock.',
        "The time is from before the release in one process to after the acquire in another (CLOCK_MONOTONIC).",
        f"The crowd: {CROWD} threads in {PROCESSES} processes, each taking the lock once and freeing it at once.",
        "Server commands include those within scripts.",
        "python-redis-lock has a client without socket_timeout: with redis-py 8's 5 s, waiting ends in a TimeoutError.",
    ]
    return Result("hand_over", "Hand-over to a waiter", tables, notes)


def open_all() -> Sequence[tuple[str, Opener]]:
    """The contestants, with their names."""
    return list(CONTESTANTS.items())


def _one_waiter(server: RedisServer, makers: Mapping[str, Maker], *, rounds: int, each: int) -> Table:
    times: dict[str, list[float]] = {name: [] for name in makers}
    with _processes(_wait_when_told, 1, server.url) as (_, (waiter,)):

        def turn(name: str) -> float:
            taken = [_hand_over(waiter, name, makers[name]) for _ in range(each)]
            times[name] += taken
            return statistics.median(taken)

        for name in makers:
            _hand_over(waiter, name, makers[name])
        measured = Rounds(TOKEN).run(rounds, {name: lambda name=name: turn(name) for name in makers})
    return Table(
        f"One waiter, {rounds * each} hand-overs",
        TOKEN,
        [
            Row(
                name,
                measured.ratio(name),
                {
                    "p50 ms": f"{statistics.median(times[name]) * 1000:.2f}",
                    "p99 ms": f"{percentile(sorted(times[name]), 99) * 1000:.2f}",
                },
            )
            for name in makers
        ],
    )


def _hand_over(waiter: Connection, name: str, make: Maker) -> float:
    """Seconds from a release to the end of the other's acquire."""
    lock = make(f"one:{name}")
    assert lock.acquire(0.2), name
    waiter.send((name, f"one:{name}"))
    waiter.recv()
    time.sleep(BLOCKED_AFTER + random.uniform(0, PHASE))
    released_at = time.monotonic()
    lock.release()
    acquired_at: float = waiter.recv()
    waiter.recv()
    return acquired_at - released_at


def _wait_when_told(url: str, orders: Connection) -> None:
    """In the waiter's process: acquire what is asked for, say when, release."""
    makers, _ = made({name: lambda opener=opener: opener([url]) for name, opener in open_all()})
    while (order := orders.recv()) is not None:
        name, key = order
        lock = makers[name](key)
        orders.send("waiting")
        assert lock.acquire(WAIT), name
        orders.send(time.monotonic())
        lock.release()
        orders.send("released")


def _crowd(server: RedisServer, makers: Mapping[str, Maker], *, rounds: int, seconds: float) -> Table:
    """What 50 cost while they wait for `seconds`, once; and in each round, how long until each has had its turn."""
    drains: dict[str, list[_Crowd]] = {name: [] for name in makers}
    with _processes(_wait_in_crowd, PROCESSES, server.url) as (processes, waiters):
        # Long enough to see what is repeated every few seconds; a rate, which needs no rounds.
        waits = {
            name: _observe(server, processes, waiters, name, make, seconds=seconds) for name, make in makers.items()
        }

        def turn(name: str) -> float:
            drains[name].append(_observe(server, processes, waiters, name, makers[name], seconds=0.0))
            return drains[name][-1].drained

        measured = Rounds(TOKEN).run(rounds, {name: lambda name=name: turn(name) for name in makers})
    rows = [Row(name, measured.ratio(name), _columns(waits[name], drains[name])) for name in makers]
    return Table(f"{CROWD} waiters, until each has had the lock once", TOKEN, rows)


@dataclass(frozen=True, slots=True)
class _Crowd:
    """One crowd: commands per waiter and second, and share of a core, while all wait; seconds, and commands, until each
    has had the lock.
    """

    rate: float
    cpu: float
    drained: float
    commands: int


def _columns(waiting: _Crowd, drains: Sequence[_Crowd]) -> dict[str, str]:
    return {
        "ms": f"{statistics.median(one.drained for one in drains) * 1000:.0f}",
        "server commands meanwhile": f"{statistics.median(one.commands for one in drains):.0f}",
        "commands/s per blocked waiter": f"{waiting.rate:.2f}",
        "blocked waiters' share of a core": f"{waiting.cpu:.1%}",
    }


def _observe(
    server: RedisServer,
    processes: Sequence[BaseProcess],
    waiters: Sequence[Connection],
    name: str,
    make: Maker,
    *,
    seconds: float,
) -> _Crowd:
    lock = make(f"crowd:{name}")
    assert lock.acquire(0.2), name
    for waiter in waiters:
        waiter.send((name, f"crowd:{name}"))
    for waiter in waiters:
        waiter.recv()
    time.sleep(0.5)
    with server.client() as client:
        commands, cpu = _commands(client), _cpu(processes)
        time.sleep(seconds)
        # One of them was our own INFO.
        rate = (_commands(client) - commands - 1) / seconds / CROWD if seconds else 0.0
        share = (_cpu(processes) - cpu) / seconds if seconds else 0.0
        before = _commands(client)
        released_at = time.monotonic()
        lock.release()
        last = max(waiter.recv() for waiter in waiters)
        return _Crowd(rate, share, last - released_at, _commands(client) - before - 1)


def _wait_in_crowd(url: str, orders: Connection) -> None:
    """In each of the five processes: ten threads acquire what is asked for, and release it."""
    makers, _ = made({name: lambda opener=opener: opener([url]) for name, opener in open_all()})
    while (order := orders.recv()) is not None:
        name, key = order
        acquired_at: list[float] = []
        locks = [makers[name](key) for _ in range(THREADS)]
        threads = [threading.Thread(target=_take_once, args=(lock, acquired_at)) for lock in locks]
        for thread in threads:
            thread.start()
        orders.send("waiting")
        for thread in threads:
            thread.join()
        assert len(acquired_at) == THREADS, name
        orders.send(max(acquired_at))


def _take_once(lock: Any, acquired_at: list[float]) -> None:
    if lock.acquire(WAIT):
        acquired_at.append(time.monotonic())
        lock.release()


@contextmanager
def _processes(
    target: Callable[[str, Connection], None], count: int, url: str
) -> Iterator[tuple[Sequence[BaseProcess], Sequence[Connection]]]:
    """Processes that run `target`, each with a pipe for its orders; None ends them."""
    pipes = [_spawn.Pipe() for _ in range(count)]
    processes = [_spawn.Process(target=target, args=(url, theirs), daemon=True) for _, theirs in pipes]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    connections = [mine for mine, _ in pipes]
    try:
        yield processes, connections
        for connection in connections:
            connection.send(None)
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()


def _commands(client: Any) -> int:
    return int(client.info("stats")["total_commands_processed"])


def _cpu(processes: Sequence[BaseProcess]) -> float:
    times = [psutil.Process(process.pid).cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)
