"""The lock server stalls, restarts or refuses while tasks run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_singleton_lock import LockLost, clock
from tests.integration.conftest import POOLS, Shop, is_alive, until
from tests.patience import LIMIT
from tests.recording import overlaps
from tests.redis_server import RedisServer

#: For tasks that must stop in time: what is left of the lease by then is more than a busy machine takes away.
LONG_TTL = 8.0

LONG = {"singleton_lock": {"ttl": LONG_TTL}}


@pytest.fixture
def split(redis_server: RedisServer, own_redis: RedisServer, shop_on: Callable[..., Shop]) -> Shop:
    """A shop with a separate lock server, which the test may break."""
    return shop_on(redis_server, locks=own_redis)


@pytest.mark.parametrize("pool", POOLS)
def test_holder_aborts_before_its_lease_ends_when_redis_stalls(split: Shop, own_redis: RedisServer, pool: str) -> None:
    split.start("one", "two", pool=pool)
    victim = split.send("exclusive", "report", 60.0, **LONG)
    split.record.wait_for(starts=1)
    own_redis.pause()
    paused_at = clock.now()
    split.record.wait_for(starts=1, ends=1, job="report")
    own_redis.resume()
    second = split.send("waiting", "report")
    assert second.get(timeout=LIMIT) == "report"
    with pytest.raises(LockLost, match="could not be renewed"):
        victim.get(timeout=LIMIT)
    aborted, next_run = split.record.runs("report")
    assert aborted.outcome == "aborted"
    assert aborted.end < paused_at + LONG_TTL, "the last renewal was sent before the pause"
    assert overlaps([aborted, next_run]) == []
    (lost,) = split.record.wait_for(starts=1, job="lost")  # Its thread may be slower than the result.
    assert lost.start < paused_at + LONG_TTL


def test_child_that_does_not_stop_is_killed_before_its_lease_ends(split: Shop, own_redis: RedisServer) -> None:
    split.start("one")
    split.send("stubborn", "report", 60.0, **LONG)
    (run,) = split.record.wait_for(starts=1)
    own_redis.pause()
    paused_at = clock.now()
    while is_alive(run.pid):
        assert clock.now() < paused_at + LONG_TTL, "it is still alive when its lease has ended"
        clock.sleep(0.01)


def test_warned_task_goes_on(split: Shop, own_redis: RedisServer) -> None:
    split.start("one")
    result = split.send("warned", "report", 60.0)
    split.record.wait_for(starts=1)
    own_redis.pause()
    split.record.wait_for(starts=1, job="lost")
    assert split.record.runs("report")[0].outcome == "open"
    split.record.let_end("report")
    split.record.wait_for(ends=1, job="report")
    own_redis.resume()
    assert result.get(timeout=LIMIT) == "report"
    assert split.record.runs("report")[0].outcome == "done"


def test_short_outage_is_survived(split: Shop, own_redis: RedisServer) -> None:
    (worker,) = split.start("one")
    ttl = 2 * LONG_TTL
    result = split.send("exclusive", "report", LIMIT, singleton_lock={"ttl": ttl})
    split.record.wait_for(starts=1)
    (key,) = split.held()
    own_redis.pause()
    until(lambda: "trying again" in worker.log, "a renewal has failed")
    own_redis.resume()
    with split.locks() as client:
        until(lambda: client.pttl(key) > ttl * 1000 * 2 / 3, "the lease is renewed after the outage")
    split.record.let_end("report")
    assert result.get(timeout=LIMIT) == "report"
    assert split.record.runs("lost") == []


def test_message_goes_back_while_redis_is_down_and_runs_when_it_is_up(split: Shop, own_redis: RedisServer) -> None:
    (worker,) = split.start("one")
    own_redis.kill()
    results = [split.send("exclusive", f"job-{n}") for n in range(5)]
    until(lambda: worker.log.count("put back, due in") >= 5)
    assert split.record.runs() == []
    assert {result.state for result in results} == {"PENDING"}
    own_redis.start()
    for n, result in enumerate(results):
        assert result.get(timeout=LIMIT) == f"job-{n}"
    assert len(split.record.runs()) == 5


def test_nothing_is_lost_when_broker_and_locks_are_down_together(
    own_redis: RedisServer, shop_on: Callable[..., Shop]
) -> None:
    """The message was received and acknowledged, and nothing can be sent: it waits in its slot."""
    with RedisServer() as broker:
        shop = shop_on(broker, locks=own_redis, broker_transport_options={"socket_timeout": 1})
        (worker,) = shop.start("one")
        own_redis.pause()
        shop.send("exclusive", "report")
        until(lambda: "received" in worker.log)
        broker.pause()
        until(lambda: "cannot be put back" in worker.log)
        own_redis.resume()
        runs = shop.record.wait_for(ends=1, job="report")
        broker.resume()
        assert len(runs) == 1
