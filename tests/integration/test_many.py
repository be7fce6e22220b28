"""Many executions at once in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration.conftest import Shop
from tests.patience import LIMIT
from tests.proxy import LossyProxy
from tests.redis_server import RedisServer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("pool", ["threads", "gevent", "eventlet"])
def test_two_hundred_at_once_share_one_heartbeat(shop: Shop, pool: str) -> None:
    # The lease is renewed once while they run; it is long, since a process that starts 200 tasks may be slow at first.
    shop.conf["singleton_lock_ttl"] = 12.0
    shop.start("one", pool=pool, concurrency=200)
    results = [shop.send("counting_threads", f"job-{n}", 5.0) for n in range(200)]
    counts = [result.get(timeout=LIMIT) for result in results]
    assert max(counts) <= 2, "threads in the process: one renews, and one watches"
    runs = shop.record.runs()
    assert max(run.start for run in runs) < min(run.end for run in runs), "they did not run at once"
    assert shop.record.runs("lost") == []


@pytest.mark.parametrize("pool", ["threads", "gevent", "eventlet"])
def test_lease_is_renewed_while_the_broker_is_away(
    redis_server: RedisServer, shop_on: Callable[..., Shop], pool: str
) -> None:
    """Celery's pauses between its tries to reach the broker grow longer and longer."""
    broker = redis_server.url_of(0)
    with LossyProxy(redis_server.port) as proxy:
        behind = broker.replace(str(redis_server.port), str(proxy.port))
        shop = shop_on(redis_server, broker_url=behind, singleton_lock_ttl=3.0)
        shop.app.conf.broker_url = broker
        (worker,) = shop.start("one", pool=pool)
        result = shop.send("exclusive", "report", 14.0)
        shop.record.wait_for(starts=1)
        proxy.cut()
    assert result.get(timeout=LIMIT) == "report"
    assert "Trying again in 6" in worker.log
