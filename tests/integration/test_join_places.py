"""Copies that join and messages that follow, with every kind of lock server, pool and broker."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import LONG, POOLS, Shop
from tests.integration.test_join import JOIN, until_joined
from tests.patience import LIMIT
from tests.rabbitmq import MISSING, RabbitMQ
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


class TestServers:
    def test_join(self, servers_shop: Shop) -> None:
        servers_shop.start("one", "two")
        check_join(servers_shop)


@pytest.mark.parametrize("pool", [pool for pool in POOLS if pool != "prefork"])
class TestPools:
    def test_join(self, shop: Shop, pool: str) -> None:
        shop.start("one", "two", pool=pool)
        check_join(shop)


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
class TestRabbitMQ:
    def test_join(self, rabbit_shop: Shop) -> None:
        rabbit_shop.start("one", "two")
        check_join(rabbit_shop)
