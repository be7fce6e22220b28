"""Other people's code around the body of an exclusive task: it runs under the lock, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_singleton_lock import InvalidOption, LockConflict, SingletonTask
from tests.integration.conftest import Shop
from tests.patience import LIMIT
from tests.recording import overlaps
from tests.redis_server import RedisServer

#: Equal calls that are sent at once, and slots for all of them.
CALLS = 4

EXCLUSIVE = "tests.integration.app.exclusive"

APP = "tests.integration.bases_app"


@pytest.fixture
def shop_in(redis_server: RedisServer, shop_on: Callable[..., Shop]) -> Callable[..., Shop]:
    """Make a shop whose task has its body in one of the forms of `bases_app`."""
    return lambda form, **conf: shop_on(redis_server, test_form=form, **conf)


@pytest.mark.parametrize(
    ("form", "found", "instead"),
    [
        ("FrameworkFirst", "Framework.__call__", "class FrameworkFirst(SingletonTask, Framework)"),
        ("MixinFirst", "Mixin.__call__", "super().__call__"),
        ("Own", "Own.__call__", "super().__call__"),
        ("OwnBind", "Own.__call__", "super().__call__"),
        ("annotated", "task_annotations", "@__call__"),
        ("OwnStrategy", "Strategy", "Lock"),
        ("generated", "generator", "list"),
        ("text as a key", "lock_key", "['job'] or '{job}'"),
    ],
)
def test_worker_does_not_start_with_a_body_that_would_run_without_its_lock(
    shop_in: Callable[..., Shop], form: str, found: str, instead: str
) -> None:
    shop = shop_in(form)
    with pytest.raises(AssertionError, match="did not start"):
        shop.start("one", app=APP)
    assert "InvalidOption" in shop.log
    assert EXCLUSIVE in shop.log
    assert found in shop.log
    assert instead in shop.log


@pytest.mark.parametrize(
    "form",
    [
        *("FrameworkBehind", "CooperativeFirst", "OwnCooperative", "annotated around", "instrumented", "autoretry"),
        "methods as options",
    ],
)
def test_equal_calls_run_one_at_a_time(shop_in: Callable[..., Shop], form: str) -> None:
    shop = shop_in(form)
    shop.start("one", app=APP, concurrency=CALLS)
    running = shop.send("exclusive", "report")
    shop.record.wait_for(starts=1)
    for refused in [shop.send("exclusive", "report") for _ in range(CALLS - 1)]:
        with pytest.raises(LockConflict):
            refused.get(timeout=LIMIT)
    shop.record.let_end("report")
    assert running.get(timeout=LIMIT) == "report"
    assert len(shop.record.runs("report")) == 1


@pytest.mark.parametrize("form", ["Indirect", "Indirect autoretry", "Skipping", "replaced"])
@pytest.mark.parametrize("pool", ["prefork", pytest.param("threads", marks=pytest.mark.slow)])
def test_body_that_is_reached_without_its_lock_does_not_run(shop_in: Callable[..., Shop], form: str, pool: str) -> None:
    shop = shop_in(form, singleton_lock_scope="until_executed")

    @shop.app.task(base=SingletonTask, name=EXCLUSIVE, lock_key=["job"])
    def task(job: str) -> None: ...

    (worker,) = shop.start("one", app=APP, concurrency=CALLS, pool=pool)
    shop.record.let_end("report")
    for _ in range(2):  # The first leaves nothing behind that would keep the second one from being sent.
        with pytest.raises(InvalidOption, match=r"without its lock.*__call__"):
            task.delay("report").get(timeout=LIMIT)
    assert shop.record.runs() == []
    assert worker.is_untouched


def test_body_does_not_run_again_where_its_lock_is_free_again(shop_in: Callable[..., Shop]) -> None:
    shop = shop_in("Twice")
    shop.start("one", app=APP)
    shop.record.let_end("report")
    with pytest.raises(InvalidOption, match="Twice"):
        shop.send("exclusive", "report").get(timeout=LIMIT)
    assert len(shop.record.runs("report")) == 1


@pytest.mark.parametrize("conf", [{}, {"singleton_lock_enabled": False}], ids=["locked", "without a lock"])
def test_body_may_call_itself(shop_in: Callable[..., Shop], conf: dict[str, Any]) -> None:
    shop = shop_in("recursive", **conf)
    shop.start("one", app=APP)
    shop.record.let_end("report")
    assert shop.send("exclusive", "report").get(timeout=LIMIT) == "report"
    assert overlaps(shop.record.runs("other")) == []
