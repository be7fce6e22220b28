"""Real workers with locks on a Redlock, on a master that Sentinels replace, or on a cluster; and semaphores."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import clock
from tests.integration.conftest import FORGETFUL, LONG, Shop, kill_child, redelivering, until
from tests.patience import LIMIT
from tests.recording import Run, overlaps
from tests.redis_server import RedisServer
from tests.servers import Cluster, Nodes, SentinelGroup

#: Long enough for a failover within two thirds of it.
TTL = 12.0


def shop_of(group: Nodes | SentinelGroup | Cluster, shop_on: Callable[..., Shop], broker: RedisServer) -> Shop:
    options = {"restart_delay": False} if isinstance(group, Nodes) else group.options
    return shop_on(
        broker, singleton_lock_backend=group.url, singleton_lock_transport_options=options, singleton_lock_ttl=TTL
    )


@pytest.fixture
def shop(
    group: Nodes | SentinelGroup | Cluster, redis_server: RedisServer, shop_on: Callable[..., Shop]
) -> Iterator[Shop]:
    return shop_of(group, shop_on, redis_server)


def break_(group: Nodes | SentinelGroup | Cluster, shop: Shop) -> None:
    """Do to a group what it is meant to survive."""
    if isinstance(group, Nodes):
        group.servers[0].kill()
        group.servers[1].pause()
    elif isinstance(group, SentinelGroup):
        group.fail_over()
    else:
        key = next(key for server in group.servers for key in server.client().scan_iter("*:run"))
        group.fail_over(key)


def test_copies_run_one_at_a_time(shop: Shop) -> None:
    shop.start("one", "two")
    results = [shop.send("waiting", "report") for _ in range(20)]
    assert [result.get(timeout=LIMIT) for result in results] == ["report"] * 20
    runs = shop.record.runs("report")
    assert overlaps(runs) == []
    assert [run.fence for run in runs] == sorted({run.fence for run in runs})


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Nodes, SentinelGroup, Cluster])
def test_running_task_goes_on_when_a_server_dies(
    kind: Callable[[], Nodes | SentinelGroup | Cluster], redis_server: RedisServer, shop_on: Callable[..., Shop]
) -> None:
    with kind() as group:
        check_that_it_goes_on(group, shop_of(group, shop_on, redis_server))


def check_that_it_goes_on(group: Nodes | SentinelGroup | Cluster, shop: Shop) -> None:
    shop.start("one", "two")
    running = shop.send("exclusive", "report", 1.5 * TTL)
    shop.record.wait_for(starts=1)
    clock.sleep(0.5)  # Replication takes only milliseconds.
    break_(group, shop)
    copy = shop.send("exclusive", "report")
    with pytest.raises(TaskRevokedError, match=running.id):
        copy.get(timeout=LIMIT)
    assert running.get(timeout=LIMIT) == "report"
    following = shop.send("waiting", "report")
    assert following.get(timeout=LIMIT) == "report"
    runs = shop.record.runs("report")
    assert [run.outcome for run in runs] == ["done", "done"]
    assert overlaps(runs) == []
    assert runs[1].fence > runs[0].fence


def test_lock_of_a_killed_child_is_freed_at_once(shop: Shop) -> None:
    shop.start("one", "two")
    shop.send("exclusive", "report", 300.0)
    (run,) = shop.record.wait_for(starts=1)
    killed_at = kill_child(run)
    assert shop.send("waiting", "report").get(timeout=LIMIT) == "report"
    dead, following = shop.record.runs("report", killed_at=killed_at)
    assert overlaps([dead, following]) == []
    assert following.start - killed_at < TTL / 2


def test_redelivered_copy_of_a_finished_message_is_dropped(
    group: Nodes | SentinelGroup | Cluster, redis_server: RedisServer, shop_on: Callable[..., Shop]
) -> None:
    shop = shop_of(group, shop_on, redis_server)
    shop.conf["broker_transport_options"] = FORGETFUL
    shop.app.conf.update(shop.conf)
    (victim,) = shop.start("victim")
    result = shop.send("late", "report", task_id="dies-stored")
    assert result.get(timeout=LIMIT) == "report"
    victim.process.wait(LIMIT)
    with redelivering(shop):
        shop.start("other")
        until(lambda: shop.app.connection().default_channel.client.hlen("unacked") == 0)
    assert len(shop.record.runs("report")) == 1


class TestSemaphore:
    @pytest.fixture
    def shop(self, redis_server: RedisServer, shop_on: Callable[..., Shop]) -> Shop:
        return shop_on(redis_server, singleton_lock_ttl=TTL)

    def test_limit_of_runs(self, shop: Shop) -> None:
        shop.start("one", "two", "three")
        results = [shop.send("paired", "report", 0.3) for _ in range(12)]
        assert [result.get(timeout=LIMIT) for result in results] == ["report"] * 12
        runs = shop.record.runs("report")
        assert most_at_once(runs) == 2
        assert len({run.fence for run in runs}) == 12

    def test_copy_beyond_the_limit_is_refused(self, shop: Shop) -> None:
        # Enough processes that a worker that runs both can refuse the third.
        shop.start("one", "two", concurrency=3)
        running = [shop.send("late_paired", "report", LONG) for _ in range(2)]
        shop.record.wait_for(starts=2)
        with pytest.raises(TaskRevokedError):
            shop.send("late_paired", "report").get(timeout=LIMIT)
        shop.record.let_end("report")
        assert [result.get(timeout=LIMIT) for result in running] == ["report"] * 2


def most_at_once(runs: list[Run]) -> int:
    edges = sorted([(run.start, 1) for run in runs] + [(run.end, -1) for run in runs])
    held = most = 0
    for _, change in edges:
        held += change
        most = max(most, held)
    return most
