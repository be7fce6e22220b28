"""A lock over five servers: all are well, one hangs, one is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

from benchmarks.contestants import GIVE_UP, NODES, ON_ONE_NODE, Maker, is_lock
from benchmarks.measure import Result, Table, apart, measured, percentile
from tests.redis_server import RedisServer

COUNT = 5

#: What happens to the last node, and how it is undone.
STATES: Mapping[str, tuple[Callable[[RedisServer], None], Callable[[RedisServer], None]]] = {
    f"All {COUNT} nodes well": (lambda node: None, lambda node: None),
    "One node hangs (SIGSTOP)": (RedisServer.pause, RedisServer.resume),
    "One node is gone (killed)": (RedisServer.stop, lambda node: None),
}


def run(*, quick: bool = False) -> Result:
    """The last of the nodes is the one that fails; the bare lock is on the first."""
    rounds, budget = (4, 0.15) if quick else (12, 0.3)
    with ExitStack() as exits:
        servers = [exits.enter_context(RedisServer()) for _ in range(COUNT)]
        exits.enter_context(apart(*servers))
        tables = [_table(title, servers, rounds, budget) for title in STATES]
    notes = [
        f"{rounds} rounds of {budget:g} s; every pair uses another name, so that leftovers do not count.",
        "The ratio is that of whole pairs, p50 of each round, granted or not; there is none if nothing was granted.",
        f"Clients are connected before the node fails. Those of pottery and redlock-py give up after "
        f"{GIVE_UP:g} s and do not repeat; with redis-py's defaults it would be seconds to minutes.",
        "Keys left: locks on all nodes after everything was released and a node that hung has resumed.",
        "The client has its own core; the nodes share the rest.",
        "Threads: before, and the most after a pair.",
    ]
    return Result("redlock", f"Redlock over {COUNT} servers", tables, notes)


@dataclass(slots=True)
class _Seen:
    """The observations of one contestant: seconds of each acquire and release, and the most threads."""

    acquires: list[float] = field(default_factory=list)
    releases: list[float] = field(default_factory=list)
    threads: int = 0


def _table(title: str, servers: Sequence[RedisServer], rounds: int, budget: float) -> Table:
    for server in servers:
        server.flush()
    makers = {name: opener([server.url for server in servers]) for name, opener in NODES.items()}
    names = {name: f"contestant{number}" for number, name in enumerate(makers)}
    for name, maker in makers.items():
        _pairs(maker, f"{names[name]}:warm", _Seen(), budget)
    time.sleep(0.3)
    threads, seen = threading.active_count(), {name: _Seen() for name in makers}
    begin, end = STATES[title]
    begin(servers[-1])
    try:
        turns = {name: partial(_pairs, maker, names[name], seen[name], budget) for name, maker in makers.items()}
        (pairs,) = measured(ON_ONE_NODE, rounds, turns)
    finally:
        end(servers[-1])
    time.sleep(1.0)
    keys = [key for server in servers if server.pid for key in _locks_on(server)]

    def columns(name: str) -> Mapping[str, str]:
        acquires, releases = sorted(seen[name].acquires), sorted(seen[name].releases)
        return {
            "acquire p50 ms": f"{percentile(acquires, 50) * 1000:.2f}",
            "acquire p99 ms": f"{percentile(acquires, 99) * 1000:.2f}",
            "release p50 ms": f"{percentile(releases, 50) * 1000:.2f}" if releases else "",
            "granted": f"{len(releases) / len(acquires):.0%} of {len(acquires):,}",
            "threads": f"{threads} → {seen[name].threads}",
            "keys left": f"{sum(names[name] in key for key in keys):,}",
        }

    return pairs.table(title, columns, unrated=[name for name in makers if not seen[name].releases])


def _pairs(maker: Maker, name: str, seen: _Seen, budget: float) -> tuple[float]:
    """Acquire and release for `budget` seconds; return the p50 of the pairs."""
    pairs: list[float] = []
    end = time.perf_counter() + budget
    while time.perf_counter() < end or not pairs:
        lock = maker(f"{name}:{len(seen.acquires)}")
        begun = time.perf_counter()
        try:
            granted = lock.acquire()
        except Exception:  # noqa: BLE001 - each library has its own errors; it only matters that it did not grant the lock
            granted = False
        acquired_at = time.perf_counter()
        if granted:
            with suppress(Exception):  # Some raise if their lock has ended meanwhile: the machine may have stalled.
                lock.release()
                seen.releases.append(time.perf_counter() - acquired_at)
        seen.acquires.append(acquired_at - begun)
        seen.threads = max(seen.threads, threading.active_count())
        pairs.append(time.perf_counter() - begun)
    # Threads that a pair leaves running are its own cost, not that of the next pair.
    time.sleep(0.1)
    return (percentile(sorted(pairs), 50),)


def _locks_on(server: RedisServer) -> Sequence[str]:
    with server.client() as client:
        return [key for key in client.scan_iter(count=1000) if is_lock(key)]
