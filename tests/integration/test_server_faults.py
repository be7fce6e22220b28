"""The lock server refuses, forgets, or fails over while tasks run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from redis import Redis

from celery_singleton_lock import LockLost, clock
from tests.integration.conftest import Shop, until
from tests.patience import LIMIT
from tests.redis_server import RedisServer

#: For tasks that must stop in time: what is left of the lease by then is more than a busy machine takes away.
LONG_TTL = 8.0

LONG = {"singleton_lock": {"ttl": LONG_TTL}}


@pytest.fixture
def split(redis_server: RedisServer, own_redis: RedisServer, shop_on: Callable[..., Shop]) -> Shop:
    """A shop with a separate lock server, which the test may break; two workers run."""
    shop = shop_on(redis_server, locks=own_redis)
    shop.start("one", "two")
    return shop


@pytest.fixture
def server(own_redis: RedisServer) -> Iterator[Redis]:
    with own_redis.client(2) as client:
        yield client


def assert_waits_and_runs(shop: Shop, heal: Callable[[], object]) -> None:
    """A message that comes while the lock server does not work is put back, and runs when it works again."""
    result = shop.send("exclusive", "later")
    until(lambda: any("put back, due in" in worker.log for worker in shop.workers))
    assert shop.record.runs("later") == []
    heal()
    assert result.get(timeout=LIMIT) == "later"
    assert len(shop.record.runs("later")) == 1


def assert_aborted_in_time(shop: Shop, broken_at: float) -> None:
    until(lambda: shop.record.runs("report")[0].outcome != "open")
    (run,) = shop.record.runs("report")
    assert run.outcome == "aborted"
    assert run.end < broken_at + LONG_TTL


def test_failover_to_a_replica_that_missed_the_write(
    split: Shop, server: Redis, own_redis: RedisServer, redis_server: RedisServer
) -> None:
    """The new master does not know the lock: another execution may start, and the first is stopped."""
    victim = split.send("exclusive", "report", 60.0, **LONG)
    split.record.wait_for(starts=1)
    with RedisServer() as empty:
        server.replicaof("127.0.0.1", str(empty.port))
        until(lambda: server.info("replication")["master_link_status"] == "up")
        failed_over_at = clock.now()
        server.replicaof("NO", "ONE")
    with pytest.raises(LockLost, match=r"no longer has it|could not be renewed"):
        victim.get(timeout=LIMIT)
    assert_aborted_in_time(split, failed_over_at)
    assert split.send("waiting", "report").get(timeout=LIMIT) == "report"


def test_read_only_replica(split: Shop, server: Redis) -> None:
    victim = split.send("exclusive", "report", 60.0, **LONG)
    split.record.wait_for(starts=1)
    # A replica of a master that does not exist, so that it keeps its data.
    server.replicaof("127.0.0.1", "1")
    broken_at = clock.now()
    with pytest.raises(LockLost, match="could not be renewed"):
        victim.get(timeout=LIMIT)
    assert_aborted_in_time(split, broken_at)
    assert_waits_and_runs(split, lambda: server.replicaof("NO", "ONE"))


def test_restarted_empty_while_many_wait(split: Shop, own_redis: RedisServer) -> None:
    """The waiters lose their wake-up with all other data, and look again by themselves."""
    victim = split.send("exclusive", "report", 60.0)
    split.record.wait_for(starts=1)
    waiting = [split.send("waiting", "report", 0.1) for _ in range(3)]
    clock.sleep(0.5)
    own_redis.restart()
    with pytest.raises(LockLost):
        victim.get(timeout=LIMIT)
    for result in waiting:
        assert result.get(timeout=LIMIT) == "report"
    assert len(split.record.runs("report")) == 4
