"""The lock server stalls for a while: every message still ends, none runs twice, and none ends late.

Requests from before the stall are carried out after it, when the callers have long given up. The ttl is longer than
any test waits, so that a lock left behind by mistake would be held forever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from celery.result import AsyncResult

from celery_singleton_lock import clock
from tests.integration.conftest import Shop
from tests.patience import LIMIT
from tests.recording import overlaps
from tests.redis_server import RedisServer
from tests.stalling import KINDS, Place, StallingProxy

#: Seconds of the leases.
TTL = 600.0

#: Seconds of the leases that are renewed while a test watches.
RENEWED_TTL = 24.0

#: Seconds after a stall within which everything has ended: more than any of our own delays, on a busy machine.
SOON = 60.0

#: Children or threads of the worker.
SLOTS = 4

#: What each message sends; it may need others, or not.
SURE = {"ACQUIRE", "FREE"}

POOLS = ("prefork", "threads", "solo", "gevent")


@pytest.fixture
def silent(redis_server: RedisServer, own_redis: RedisServer, shop_on: Callable[..., Shop]) -> Shop:
    """A shop with a lock server that the test stops."""
    return shop_on(redis_server, locks=own_redis, singleton_lock_ttl=TTL)


@pytest.fixture
def proxy(own_redis: RedisServer) -> Iterator[StallingProxy]:
    with StallingProxy(own_redis.port) as proxy:
        yield proxy


@pytest.fixture
def proxied(
    redis_server: RedisServer, own_redis: RedisServer, proxy: StallingProxy, shop_on: Callable[..., Shop]
) -> Shop:
    """A shop whose lock server is behind the proxy."""
    return shop_on(
        redis_server,
        locks=own_redis,
        singleton_lock_backend=f"redis://127.0.0.1:{proxy.port}/2",
        singleton_lock_ttl=TTL,
    )


def warm(shop: Shop) -> None:
    """Let each child connect, and the server learn the scripts."""
    results = [shop.send("exclusive", f"warm-{number}", 0.2) for number in range(2 * SLOTS)]
    results += [shop.send("waiting", "warm", 0.01) for _ in range(2)]
    for result in results:
        result.get(timeout=LIMIT)


def send_all(shop: Shop, name: str, seconds: float) -> dict[str, AsyncResult]:
    """Send messages of each kind: acknowledged early and late, with separate locks, and in line for one lock."""
    return {
        # Long enough that the second message waits.
        **{f"{name}-{n}": shop.send("waiting", name, 0.5) for n in range(2)},
        **{f"{name}-early-{n}": shop.send("exclusive", f"{name}-early-{n}", seconds) for n in range(3)},
        **{f"{name}-late-{n}": shop.send("late", f"{name}-late-{n}", seconds) for n in range(3)},
    }


def not_as_promised(shop: Shop, results: dict[str, AsyncResult], back_at: float) -> list[str]:
    """The messages that did not succeed soon after the server was back."""
    deadline = max(back_at, clock.now()) + SOON
    open_ones = dict(results)
    while open_ones and clock.now() < deadline:
        open_ones = {name: it for name, it in open_ones.items() if shop.state_of(it) not in ("SUCCESS", "FAILURE")}
        clock.sleep(0.05)
    states = {name: shop.state_of(result) for name, result in results.items()}
    return [f"{name}: {state}" for name, state in states.items() if state != "SUCCESS"]


def run_twice(shop: Shop) -> list[str]:
    """Ids of messages that were begun more than once."""
    counts = Counter(run.task_id for run in shop.record.runs())
    return [task_id for task_id, count in counts.items() if count > 1]


@pytest.mark.parametrize("task", ["exclusive", "late"])
@pytest.mark.parametrize("pool", ["prefork", *(pytest.param(pool, marks=pytest.mark.slow) for pool in POOLS[1:])])
def test_nothing_is_lost_in_a_stall_while_many_ask(silent: Shop, own_redis: RedisServer, pool: str, task: str) -> None:
    silent.start("one", pool=pool, concurrency=SLOTS)
    warm(silent)
    own_redis.pause()
    results = {f"job-{number}": silent.send(task, f"job-{number}") for number in range(2 * SLOTS)}
    clock.sleep(4.5)
    own_redis.resume()
    assert not_as_promised(silent, results, clock.now()) == []
    assert run_twice(silent) == []


@pytest.mark.parametrize(("kind", "place"), [("ACQUIRE", "front"), ("FREE", "behind")])
def test_stall_at_a_command(proxied: Shop, proxy: StallingProxy, kind: str, place: Place) -> None:
    proxied.start("one", concurrency=SLOTS)
    assert stalls(proxied, proxy, [kind], place, 4.5) == {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seconds", [1.0, 4.5, 10.0])
@pytest.mark.parametrize("place", ["front", "within", "behind"])
@pytest.mark.parametrize("pool", POOLS)
def test_stall_at_each_command(proxied: Shop, proxy: StallingProxy, pool: str, place: Place, seconds: float) -> None:
    """In front of, within and behind each command that we send; one place each, since these tests mostly wait."""
    proxied.start("one", pool=pool, concurrency=SLOTS)
    assert stalls(proxied, proxy, list(KINDS), place, seconds) == {}


@pytest.mark.slow
@pytest.mark.parametrize("place", ["front", "within", "behind"])
@pytest.mark.parametrize("pool", POOLS)
def test_stall_at_a_renewal(proxied: Shop, proxy: StallingProxy, pool: str, place: Place) -> None:
    """It ends before the last third of the lease, in which tasks are stopped."""
    proxied.start("one", pool=pool, concurrency=SLOTS)
    warm(proxied)
    call = {"ttl": RENEWED_TTL}
    tasks = ("exclusive", "late") if pool != "solo" else ("late",)
    results = {task: proxied.send(task, task, RENEWED_TTL / 2, singleton_lock=call) for task in tasks}
    for task in tasks:
        proxied.record.wait_for(starts=1, job=task)
    proxy.stall("RENEW", place, RENEWED_TTL / 4)
    assert proxy.struck.wait(LIMIT)
    assert not_as_promised(proxied, results, proxy.back_at) == []
    assert run_twice(proxied) == []
    assert proxied.record.runs("lost") == []


def stalls(shop: Shop, proxy: StallingProxy, kinds: list[str], place: Place, seconds: float) -> dict[str, object]:
    """The broken promises of each stall."""
    warm(shop)
    proxy.seen.clear()
    for result in send_all(shop, "first", 0.05).values():
        result.get(timeout=LIMIT)
    seen = set(proxy.seen)
    assert seen >= SURE
    found: dict[str, object] = {}
    not_met: set[str] = set()
    for kind in sorted(seen.intersection(kinds)):
        proxy.stall(kind, place, seconds)
        results = send_all(shop, kind, 0.05)
        if not proxy.struck.wait(LIMIT if kind in SURE else 5):
            proxy.disarm()
            not_met.add(kind)
        wrong = not_as_promised(shop, results, proxy.back_at)
        if wrong:
            found[kind] = wrong
    print(f"{sorted(seen)} were stalled, but not {sorted(not_met)}")
    assert not not_met & SURE
    if twice := run_twice(shop):
        found["run twice"] = twice
    if met := overlaps(shop.record.runs()):
        found["at the same time"] = met
    return found
