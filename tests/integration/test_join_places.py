"""Copies that join and messages that follow, with every kind of lock server, pool and broker."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from celery import group as group_of

from tests.integration.conftest import LONG, POOLS, Shop, kill_child, quick_first
from tests.integration.queued_tasks import define
from tests.integration.test_followers import until_followed
from tests.integration.test_join import JOIN, until_joined
from tests.integration.test_queued import start
from tests.patience import LIMIT
from tests.rabbitmq import MISSING, RabbitMQ
from tests.recording import overlaps
from tests.redis_server import RedisServer
from tests.servers import Cluster, Nodes, SentinelGroup

#: Seconds of leases: no test here waits for the end of one, and a busy machine stops no process for so long.
TTL = 60.0


@pytest.fixture
def servers_shop(
    group: Nodes | SentinelGroup | Cluster, redis_server: RedisServer, shop_on: Callable[..., Shop]
) -> Shop:
    options = {"restart_delay": False} if isinstance(group, Nodes) else getattr(group, "options", {})
    return shop_on(
        redis_server,
        singleton_lock_backend=group.url,
        singleton_lock_transport_options=options,
        singleton_lock_ttl=12.0,
    )


@pytest.fixture
def rabbit_shop(rabbitmq: RabbitMQ, redis_server: RedisServer, shop_on: Callable[..., Shop], tmp_path: Path) -> Shop:
    queue = os.path.basename(tmp_path)
    return shop_on(redis_server, broker_url=rabbitmq.url, task_default_queue=queue, singleton_lock_ttl=TTL)


def join(shop: Shop, seconds: float = LONG) -> Any:
    return shop.send("exclusive", "report", seconds, headers=JOIN)


def check_join(shop: Shop) -> None:
    first = join(shop)
    shop.record.wait_for(starts=1, job="report")
    copies = [join(shop) for _ in range(5)]
    until_joined(shop, 5)
    shop.record.let_end("report")
    assert [copy.get(timeout=LIMIT) for copy in [first, *copies]] == ["report"] * 6
    assert len(shop.record.runs("report")) == 1


def check_join_of_one_that_dies(shop: Shop) -> None:
    join(shop)
    shop.record.wait_for(starts=1, job="report")
    copies = [join(shop, 0.5) for _ in range(5)]
    until_joined(shop, 5)
    (run,) = shop.record.runs("report")
    killed_at = kill_child(run)
    assert [copy.get(timeout=LIMIT) for copy in copies] == ["report"] * 5
    runs = shop.record.runs("report", killed_at=killed_at)
    assert overlaps(runs) == []
    assert len([each for each in runs if each.outcome == "done"]) == 1


def check_following(shop: Shop, tasks: SimpleNamespace, scope: str) -> None:
    job, queue = tasks.who[scope], f"leader-{uuid4()}"
    first = job.apply_async(("report", LONG), queue=queue)
    parts = group_of(job.si("report"), job.si("report")).apply_async()
    shop.app.control.add_consumer(queue)  # Only now may it start: "until_executing" frees its lock then.
    shop.record.wait_for(starts=1, job="report")
    until_followed(shop, 2)
    shop.record.let_end("report")
    assert parts.get(timeout=LIMIT) == [first.id] * 2
    assert len(shop.record.runs("report")) == 1


def check_following_one_that_is_lost(shop: Shop, tasks: SimpleNamespace) -> None:
    job = tasks.who_briefly
    job.apply_async(("report",), queue="another")
    parts = group_of(job.si("report", 0.5) for _ in range(3)).apply_async()
    found = parts.get(timeout=LIMIT)
    assert len(set(found)) == len(shop.record.runs("report")) == 1


class TestServers:
    def test_join(self, servers_shop: Shop) -> None:
        servers_shop.start("one", "two")
        check_join(servers_shop)

    @pytest.mark.slow
    def test_join_of_a_dying_task(self, servers_shop: Shop) -> None:
        servers_shop.start("one", "two")
        check_join_of_one_that_dies(servers_shop)

    @pytest.mark.parametrize("scope", quick_first("until_executed", "until_executing"))
    def test_following(self, servers_shop: Shop, scope: str) -> None:
        start(servers_shop, "one", "two")
        check_following(servers_shop, define(servers_shop.app), scope)

    @pytest.mark.slow
    def test_following_a_lost_message(self, servers_shop: Shop) -> None:
        start(servers_shop, "one", "two")
        check_following_one_that_is_lost(servers_shop, define(servers_shop.app))


@pytest.mark.parametrize("pool", [pool for pool in POOLS if pool != "prefork"])
class TestPools:
    def test_join(self, shop: Shop, pool: str) -> None:
        shop.start("one", "two", pool=pool)
        check_join(shop)

    def test_following(self, shop: Shop, pool: str) -> None:
        start(shop, "one", "two", pool=pool)
        check_following(shop, define(shop.app), "until_executed")


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
class TestRabbitMQ:
    def test_join(self, rabbit_shop: Shop) -> None:
        rabbit_shop.start("one", "two")
        check_join(rabbit_shop)

    def test_join_of_a_dying_task(self, rabbit_shop: Shop) -> None:
        rabbit_shop.start("one", "two")
        check_join_of_one_that_dies(rabbit_shop)

    @pytest.mark.parametrize("scope", quick_first("until_executed", "until_executing"))
    def test_following(self, rabbit_shop: Shop, scope: str) -> None:
        start(rabbit_shop, "one", "two")
        check_following(rabbit_shop, define(rabbit_shop.app), scope)

    def test_following_a_lost_message(self, rabbit_shop: Shop) -> None:
        start(rabbit_shop, "one", "two")
        check_following_one_that_is_lost(rabbit_shop, define(rabbit_shop.app))
