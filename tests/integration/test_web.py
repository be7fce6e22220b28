"""The live page beside real workers on a real Redis."""

from __future__ import annotations

from collections.abc import Callable

from celery_singleton_lock.testing import RedisServer
from tests.integration.conftest import LONG, Shop, until
from tests.integration.operators import environment_of, locks
from tests.integration.pages import site
from tests.patience import LIMIT


def test_page_shows_what_is_held_and_what_was_refused(shop: Shop) -> None:
    (worker,) = shop.start("one")
    running = shop.send("exclusive", "report", LONG)
    shop.record.wait_for(starts=1)
    copy = shop.send("exclusive", "report")
    copy.get(timeout=LIMIT, propagate=False)
    with site(shop) as page:
        status, shown = page.read("/locks")
        assert status == 200
        assert running.id in shown
        assert worker.name in shown
        until(lambda: copy.id in page.read("/refused")[1])  # The journal is written every few seconds.
        assert running.id in page.read(f"/id?id={copy.id}")[1]
        assert "worker one@test: " in page.read("/doctor")[1]
        assert 'singleton_lock_held_now{lock="job"} 1.0' in page.read("/metrics")[1]


def test_page_goes_on_when_the_lock_server_is_gone_and_comes_back(
    own_redis: RedisServer, redis_server: RedisServer, shop_on: Callable[..., Shop]
) -> None:
    shop = shop_on(redis_server, locks=own_redis)
    with site(shop) as page:
        assert page.read()[0] == 200
        own_redis.kill()
        until(lambda: page.read()[0] == 503)
        assert "The lock server does not answer" in page.read()[1]
        own_redis.start()
        until(lambda: page.read()[0] == 200)


def test_address_in_use_is_an_error_that_says_so(shop: Shop) -> None:
    with site(shop) as page:
        port = page.url.rpartition(":")[2]
        second = locks("web", "--port", port, env=environment_of(shop))
        assert second.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port}" in second.stderr


def test_locks_in_memory_cannot_be_shown_by_another_process(shop: Shop) -> None:
    told = locks("web", env=environment_of(shop, singleton_lock_backend="memory://"))
    assert told.returncode == 1
    assert "memory:// locks are in each process of its own" in told.stderr
