"""What it costs to hold many locks at once, each renewed before it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection

import psutil
import redis_lock
from redis import Redis

from benchmarks.contestants import ONE_SERVER, TTL, holder, is_lock
from benchmarks.measure import Result, Rounds
from benchmarks.processes import Child
from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.testing import RedisServer

BASELINE, IDLE = "python-redis-lock, auto_renewal", "an idle process"


def run(*, quick: bool = False) -> Result:
    """All processes side by side, over the same seconds: two thirds of the ttl, in which each lock is renewed."""
    count, rounds, window = 2000 if quick else 10_000, 1 if quick else 2, TTL * 2 / 3
    with RedisServer() as server, ExitStack() as exits:
        children = {
            name: exits.enter_context(Child(_hold, name, server.url_of(number), round(count * share)))
            for number, (name, (_, share)) in enumerate(CONTESTANTS.items())
        }
        starts: dict[str, tuple[int, int, int]] = {name: child.pipe.recv() for name, child in children.items()}
        used: dict[str, list[float]] = {name: [] for name in children}
        for _ in range(rounds):
            before = {name: child.ask("cpu") for name, child in children.items()}
            time.sleep(window)
            for name, child in children.items():
                used[name].append(child.ask("cpu") - before[name])
        held = {name: child.ask("held") for name, child in children.items()}
    measured = Rounds(BASELINE)
    measured.figures = {name: [one / max(starts[name][0], 1) for one in noted] for name, noted in used.items()}

    def columns(name: str) -> Mapping[str, str]:
        locks, threads, memory = starts[name]
        return {
            "locks": f"{locks:,}",
            "still held": f"{held[name]:,}",
            "threads": str(threads),
            "share of a core": f"{sum(used[name]) / rounds / window:.2%}",
            "kB per lock": f"{memory / locks / 1000:.1f}" if locks else "",
        }

    notes = [
        f"ttl {TTL:g} s; windows of {window:g} s: {rounds}; all processes at the same time, each in its own database.",
        f'"{BASELINE}" holds 3 % as many: it has a thread per lock. The ratio is of CPU seconds per lock.',
        "Ours renews each lock after a third of the ttl, python-redis-lock after two. No second turn of the baseline.",
        "Memory is what the process grew by while it took its locks, divided by their number.",
    ]
    table = measured.table("CPU time to keep one lock", columns, unrated=[IDLE])
    return Result("heartbeat", "Many locks held and renewed", [table], notes)


def _hold(orders: Connection, name: str, url: str, count: int) -> None:
    """In a process of its own: hold locks, and answer. Others see its CPU time in steps of 10 ms."""
    process = psutil.Process()
    before = process.memory_info().rss
    held = CONTESTANTS[name][0](url, count)
    orders.send((count, threading.active_count(), process.memory_info().rss - before))
    while True:
        orders.send(time.process_time() if orders.recv() == "cpu" else held())


def _renewed_by_threads(url: str, count: int) -> Callable[[], int]:
    # Its threads would not get by with the 100 connections that redis-py allows.
    client = Redis.from_url(url, max_connections=4000)
    locks = [redis_lock.Lock(client, str(number), expire=int(TTL), auto_renewal=True) for number in range(count)]
    assert all(lock.acquire(blocking=False) for lock in locks)
    return lambda: sum(lock._lock_renewal_thread.is_alive() for lock in locks)


class _Execution:
    """What holds a lease in a worker; the heartbeat refers to it weakly."""

    __slots__ = ("__weakref__", "lease")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def on_lost(self) -> None:
        """Nothing to stop here."""


def _leases(url: str, count: int) -> Callable[[], int]:
    """As a worker's tasks do."""
    store = open_url(url)
    heartbeat, executions = Heartbeat(store), []
    for number in range(count):
        lease = store.acquire(LockRequest(f"bench:{{{number}}}", new_owner(), TTL, holder()))
        assert isinstance(lease, Lease)
        executions.append(_Execution(lease))
        heartbeat.start(lease, executions[-1].on_lost)
    return lambda: sum(execution.lease.held for execution in executions)


def _locks(url: str, count: int) -> Callable[[], int]:
    """Objects of `Lock`, which renew themselves."""
    make, client = ONE_SERVER["ours: Lock"]([url]), Redis.from_url(url, decode_responses=True)
    locks = [make(str(number)) for number in range(count)]
    assert all(lock.acquire() for lock in locks)
    # By the server: what is not renewed is gone after the ttl. `locks` is kept: who lets go of one may free it.
    return lambda: min(len(locks), sum(map(is_lock, client.scan_iter(count=1000))))


def _nothing(url: str, count: int) -> Callable[[], int]:
    """A thread that sleeps: what a process costs by itself."""
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    return lambda: 0


#: Each with the share of the number of locks that it holds: one thread per lock is no good for thousands.
CONTESTANTS: Mapping[str, tuple[Callable[[str, int], Callable[[], int]], float]] = {
    BASELINE: (_renewed_by_threads, 0.03),
    "ours: as a task locks": (_leases, 1.0),
    "ours: Lock": (_locks, 1.0),
    IDLE: (_nothing, 0.0),
}
