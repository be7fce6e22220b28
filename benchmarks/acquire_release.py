"""What one uncontended lock costs: acquire + release, in one process, on one server."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from benchmarks import ours, peers
from benchmarks.locks import Maker, Opener
from benchmarks.measure import Result, Rounds, Row, Table, apart, made, seconds_per_call
from celery_singleton_lock.testing import RedisServer

BARE = "bare SET NX PX + EVALSHA"

CONTESTANTS: Mapping[str, Opener] = {
    BARE: peers.bare,
    "ours: as a task locks": ours.store,
    "ours: Lock": ours.lock,
    "redis-py Lock": peers.redis_py,
    "python-redis-lock": peers.python_redis_lock,
    "pottery, 1 master": peers.pottery_redlock,
    "redlock-py, 1 server": peers.redlock_py,
    **peers.TEXTBOOK,
}

#: What each holds back from, or does more, than the bare one.
GIVES: Mapping[str, str] = {
    BARE: "owner, expiry",
    "ours: as a task locks": "owner, expiry, holder, fence, record of the message, wake-up",
    "ours: Lock": "owner, expiry, renewal, wake-up",
    "redis-py Lock": "owner, expiry",
    "python-redis-lock": "owner, expiry in whole seconds, wake-up",
    "pottery, 1 master": "owner, expiry",
    "redlock-py, 1 server": "owner, expiry",
    "INCR + EXPIRE + DEL": "no owner; stuck for ever if it dies in between",
    "SETNX + EXPIRE + WATCH/MULTI/DEL": "owner; stuck for ever if it dies in between",
    "SET NX EX + DEL": "no owner: deletes a lock that others hold",
    "SET NX PX + EVAL": "owner, expiry",
}


def run(*, quick: bool = False) -> Result:
    """Each contestant makes a new lock object per pair, on connections that stay open."""
    rounds, budget = (15, 0.02) if quick else (60, 0.04)
    with RedisServer() as server, apart(server):
        makers = {name: lambda opener=opener: opener([server.url]) for name, opener in CONTESTANTS.items()}
        contestants, skipped = made(makers)
        pairs = {name: pair(maker, f"bench:{number}") for number, (name, maker) in enumerate(contestants.items())}
        for call in pairs.values():
            call()
        cpu: dict[str, list[float]] = {name: [] for name in pairs}

        def turn(name: str) -> float:
            passed, used = seconds_per_call(pairs[name], budget)
            cpu[name].append(used)
            return passed

        passed = Rounds(BARE).run(rounds, {name: lambda name=name: turn(name) for name in pairs})
        used = Rounds(BARE).adopt(cpu)
    return Result(
        "acquire_release",
        "Acquire and release, uncontended",
        [
            Table("One acquire + release, nobody else wants it", BARE, [*_rows(passed, GIVES), *skipped]),
            Table("CPU time of the client for that", BARE, [*_rows(used), *skipped]),
        ],
        [
            f"{rounds} rounds; each contestant {budget * 1000:.0f} ms per round, a new lock object per pair.",
            "Client and server are kept on different cores. Most of the time is that of waking each other. Ours looks"
            " for the answer for 50 µs before it sleeps, and so is not woken, which costs the CPU time that it saves;"
            " to a server that is further away it does so in one of 256 cases.",
        ],
    )


def _rows(measured: Rounds, gives: Mapping[str, str] | None = None) -> list[Row]:
    return [
        Row(
            name,
            measured.ratio(name),
            {"µs": f"{measured.median(name) * 1e6:.0f}", **({"gives": gives[name]} if gives else {})},
        )
        for name in measured.figures
    ]


def pair(maker: Maker, name: str) -> Callable[[], None]:
    """One acquire and one release of a new lock object."""

    def call() -> None:
        lock = maker(name)
        assert lock.acquire(0)
        lock.release()

    return call
