"""Other people's code around the body of an exclusive task: it runs under the lock, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_singleton_lock import InvalidOption, LockConflict, SingletonTask
from tests.integration.conftest import Shop
from tests.patience import LIMIT
from tests.redis_server import RedisServer

#: Equal calls that are sent at once, and slots for all of them.
CALLS = 4

EXCLUSIVE = "tests.integration.app.exclusive"

APP = "tests.integration.bases_app"


@pytest.fixture
def shop_in(redis_server: RedisServer, shop_on: Callable[..., Shop]) -> Callable[..., Shop]:
    """Make a shop whose task has its body in one of the forms of `bases_app`."""
    return lambda form, **conf: shop_on(redis_server, test_form=form, **conf)


def test_worker_does_not_start_with_a_body_that_would_run_without_its_lock(shop_in: Callable[..., Shop]) -> None:
    shop = shop_in("FrameworkFirst")
    with pytest.raises(AssertionError, match="did not start"):
        shop.start("one", app=APP)
    for words in ("InvalidOption", EXCLUSIVE, "Framework.__call__", "class FrameworkFirst(SingletonTask, Framework)"):
        assert words in shop.log


def test_equal_calls_run_one_at_a_time(shop_in: Callable[..., Shop]) -> None:
    shop = shop_in("FrameworkBehind")
    shop.start("one", app=APP, concurrency=CALLS)
    running = shop.send("exclusive", "report")
    shop.record.wait_for(starts=1)
    for refused in [shop.send("exclusive", "report") for _ in range(CALLS - 1)]:
        with pytest.raises(LockConflict):
            refused.get(timeout=LIMIT)
    shop.record.let_end("report")
    assert running.get(timeout=LIMIT) == "report"
    assert len(shop.record.runs("report")) == 1


def test_body_that_is_reached_without_its_lock_does_not_run(shop_in: Callable[..., Shop]) -> None:
    shop = shop_in("Indirect", singleton_lock_scope="until_executed")

    @shop.app.task(base=SingletonTask, name=EXCLUSIVE, lock_key=["job"])
    def task(job: str) -> None: ...

    (worker,) = shop.start("one", app=APP, concurrency=CALLS)
    shop.record.let_end("report")
    for _ in range(2):  # The first leaves nothing behind that would keep the second one from being sent.
        with pytest.raises(InvalidOption, match=r"without its lock.*__call__"):
            task.delay("report").get(timeout=LIMIT)
    assert shop.record.runs() == []
    assert worker.is_untouched
