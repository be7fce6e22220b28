"""A lock over five servers: all well, one that hangs, one that is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

from benchmarks import ours, peers
from benchmarks.locks import Maker, Opener
from benchmarks.measure import Result, Rounds, Row, Table, apart, made, percentile
from celery_singleton_lock.testing import RedisServer

NODES = 5

BARE = "bare lock on one server"

CONTESTANTS: Mapping[str, Opener] = {
    BARE: lambda urls: peers.bare(urls[:1]),
    "ours: Redlock": ours.redlock,
    "pottery": peers.pottery_redlock,
    "redlock-py": peers.redlock_py,
}


def run(*, quick: bool = False) -> Result:
    """The last of the nodes is the one that fails; the bare lock is on the first."""
    rounds, budget = (4, 0.15) if quick else (12, 0.3)
    with ExitStack() as exits:
        servers = [exits.enter_context(RedisServer()) for _ in range(NODES)]
        exits.enter_context(apart(*servers))
        states = {
            f"All {NODES} nodes well": _well,
            "One node hangs (SIGSTOP)": _hung,
            "One node is gone (killed)": _gone,
        }
        tables = [_table(title, state, servers, rounds, budget) for title, state in states.items()]
    notes = [
        f"{rounds} rounds of {budget:g} s; another name for every pair, so that what is left behind does not count.",
        "The ratio is of whole pairs, p50 of each round, granted or not; none where nothing was granted.",
        f"Clients are connected before the node fails. Those of pottery and redlock-py give up after "
        f"{peers.TUNED['socket_timeout']:g} s and do not repeat; redis-py's defaults mean seconds to minutes.",
        "Keys left: locks on all nodes after everything was released and, where one hung, it went on.",
        "The client has a core of its own, the nodes share the rest.",
        "Threads: before, and the most after a pair.",
    ]
    return Result("redlock", f"Redlock over {NODES} servers", tables, notes)


@contextmanager
def _well(server: RedisServer) -> Iterator[None]:
    yield


@contextmanager
def _hung(server: RedisServer) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.resume()


@contextmanager
def _gone(server: RedisServer) -> Iterator[None]:
    server.stop()
    yield


@dataclass(slots=True)
class _Seen:
    """What was seen of one contestant: seconds of each acquire and release, grants, and the most threads."""

    acquires: list[float] = field(default_factory=list)
    releases: list[float] = field(default_factory=list)
    granted: int = 0
    threads: int = 0


def _table(
    title: str,
    state: Callable[[RedisServer], AbstractContextManager[None]],
    servers: Sequence[RedisServer],
    rounds: int,
    budget: float,
) -> Table:
    for server in servers:
        server.flush()
    urls = [server.url for server in servers]
    makers, skipped = made({name: lambda opener=opener: opener(urls) for name, opener in CONTESTANTS.items()})
    names = {name: f"contestant{number}" for number, name in enumerate(makers)}
    for name, maker in makers.items():
        _turn(maker, f"{names[name]}:warm", _Seen(), budget)
    time.sleep(0.3)
    threads = threading.active_count()
    seen = {name: _Seen() for name in makers}
    with state(servers[-1]):
        turns = {
            name: lambda name=name, maker=maker: _turn(maker, names[name], seen[name], budget)
            for name, maker in makers.items()
        }
        measured = Rounds(BARE).run(rounds, turns)
    time.sleep(1.0)
    keys = _keys([server for server in servers if server.pid])
    rows = []
    for name in makers:
        left = sum(names[name] in key for key in keys)
        ratio = measured.ratio(name) if seen[name].granted else None
        rows.append(Row(name, ratio, _columns(seen[name], threads, left)))
    return Table(title, BARE, [*rows, *skipped])


def _turn(maker: Maker, name: str, seen: _Seen, budget: float) -> float:
    """Pairs for `budget` seconds; the p50 of them."""
    pairs, end = [], time.perf_counter() + budget
    while time.perf_counter() < end or not pairs:
        lock = maker(f"{name}:{len(seen.acquires)}")
        begun = time.perf_counter()
        granted = _acquired(lock.acquire)
        acquired_at = time.perf_counter()
        if granted:
            lock.release()
            seen.releases.append(time.perf_counter() - acquired_at)
        seen.acquires.append(acquired_at - begun)
        seen.granted += granted
        seen.threads = max(seen.threads, threading.active_count())
        pairs.append(time.perf_counter() - begun)
    # What a pair leaves running is its own cost, not that of who comes next.
    time.sleep(0.1)
    return percentile(sorted(pairs), 50)


def _acquired(acquire: Callable[[float], bool]) -> bool:
    try:
        return acquire(0)
    except Exception:  # noqa: BLE001 - each library has its own; what counts is that it did not grant
        return False


def _columns(seen: _Seen, threads: int, left: int) -> dict[str, str]:
    acquires, releases = sorted(seen.acquires), sorted(seen.releases)
    return {
        "acquire p50 ms": f"{percentile(acquires, 50) * 1000:.2f}",
        "acquire p99 ms": f"{percentile(acquires, 99) * 1000:.2f}",
        "release p50 ms": f"{percentile(releases, 50) * 1000:.2f}" if releases else "",
        "granted": f"{seen.granted / len(acquires):.0%} of {len(acquires):,}",
        "threads": f"{threads} → {seen.threads}",
        "keys left": f"{left:,}",
    }


def _keys(servers: Sequence[RedisServer]) -> list[str]:
    found: list[str] = []
    for server in servers:
        with server.client() as client:
            found += filter(ours.is_lock, client.scan_iter(count=1000))
    return found
