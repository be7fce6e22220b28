"""The lock server stalls for a while: every message still ends, none runs twice, and none ends late.

Requests from before the stall are carried out after it, when the callers have long given up. The ttl is longer than
any test waits, so that a lock left behind by mistake would be held forever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from celery.result import AsyncResult

from celery_singleton_lock import clock
from tests.integration.conftest import Shop
from tests.patience import LIMIT
from tests.redis_server import RedisServer

#: Seconds of the leases.
TTL = 600.0


#: Seconds after a stall within which everything has ended: more than any of our own delays, on a busy machine.
SOON = 60.0

#: Children or threads of the worker.
SLOTS = 4


POOLS = ("prefork", "threads", "solo", "gevent")


@pytest.fixture
def silent(redis_server: RedisServer, own_redis: RedisServer, shop_on: Callable[..., Shop]) -> Shop:
    """A shop with a lock server that the test stops."""
    return shop_on(redis_server, locks=own_redis, singleton_lock_ttl=TTL)


def warm(shop: Shop) -> None:
    """Let each child connect, and the server learn the scripts."""
    results = [shop.send("exclusive", f"warm-{number}", 0.2) for number in range(2 * SLOTS)]
    results += [shop.send("waiting", "warm", 0.01) for _ in range(2)]
    for result in results:
        result.get(timeout=LIMIT)


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
