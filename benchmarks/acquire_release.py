"""The cost of one uncontended lock: acquire + release, in one process, on one server."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from benchmarks.contestants import BARE, ONE_SERVER, OVER_SOCKET, Maker
from benchmarks.measure import OWN, Result, Rounds, Table, apart, measured
from tests.redis_server import RedisServer

#: What each lock gives, or lacks, compared with the bare one.
GIVES: Mapping[str, str] = {
    OVER_SOCKET: "owner, expiry; no library: the least that two round trips cost",
    f"{OWN}: as a task locks": "owner, expiry, holder, fence, record of the message, wake-up",
    f"{OWN}: Lock": "owner, expiry, renewal, wake-up",
    "python-redis-lock": "owner, expiry in whole seconds, wake-up",
    "INCR + EXPIRE + DEL": "no owner; stuck forever if it dies in between",
    "SETNX + EXPIRE + WATCH/MULTI/DEL": "owner; stuck forever if it dies in between",
    "SET NX EX + DEL": "no owner: deletes a lock that others hold",
}


#: Where client and server run.
ON_CORES: Mapping[str, Callable[[RedisServer], AbstractContextManager[None]]] = {
    "wherever the system puts client and server": lambda server: nullcontext(),
    "client and server on a core each": apart,
}


def run(*, quick: bool = False) -> Result:
    """Measure pairs; each contestant makes a new lock object per pair, on connections that stay open."""
    rounds, budget = (15, 0.02) if quick else (60, 0.04)
    tables: list[Table] = []
    for where, placed in ON_CORES.items():
        with RedisServer() as server, placed(server):
            tables += _measure(server, where, rounds, budget)
    notes = [
        f"{rounds} rounds; each contestant {budget * 1000:.0f} ms per round, a new lock object per pair.",
        "Client and server spend most of the time waking each other. No contestant polls for an answer before it"
        " sleeps, which would cost CPU time.",
    ]
    return Result("acquire_release", "Acquire and release, uncontended", tables, notes)


def _measure(server: RedisServer, where: str, rounds: int, budget: float) -> list[Table]:
    makers = {name: opener([server.url]) for name, opener in ONE_SERVER.items()}
    for name, maker in makers.items():
        seconds_per_pair(maker, f"bench:{name}", 0.0)
    turns = {name: partial(seconds_per_pair, maker, f"bench:{name}", budget) for name, maker in makers.items()}
    passed, used = measured(BARE, rounds, turns)
    return [
        passed.table(
            f"One acquire + release, nobody else wants it; {where}",
            lambda name: {"µs": _micros(passed, name), "gives": GIVES.get(name, "owner, expiry")},
        ),
        used.table(f"CPU time of the client for that; {where}", lambda name: {"µs": _micros(used, name)}),
    ]


def seconds_per_pair(maker: Maker, name: str, budget: float) -> tuple[float, float]:
    """Acquire and release over and over for that many seconds; the mean time, and the mean CPU time of this process."""
    count, begun, begun_cpu = 0, time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - begun) < budget or not count:
        lock = maker(name)
        assert lock.acquire()
        lock.release()
        count += 1
    return passed / count, (time.process_time() - begun_cpu) / count


def _micros(figures: Rounds, name: str) -> str:
    return f"{figures.median(name) * 1e6:.0f}"
