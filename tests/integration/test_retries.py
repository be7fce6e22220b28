"""A message that has begun is never refused: from its second attempt on it waits, whatever the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from celery.result import AsyncResult

from tests.integration.conftest import FORGETFUL, LONG, Shop, redelivering, until
from tests.integration.standing import Staff
from tests.patience import LIMIT
from tests.recording import overlaps
from tests.redis_server import RedisServer


@pytest.fixture
def shop(staff: Staff) -> Iterator[Shop]:
    with staff.shop(singleton_lock_ttl=60.0) as shop:
        yield shop


def retried_behind(shop: Shop, task: str = "retrying_when_told", **options: Any) -> tuple[AsyncResult, AsyncResult]:
    """A call that has begun and waits for its next attempt, and another one that has taken the lock meanwhile."""
    shop.start("one", "two", concurrency=3)
    first = shop.send(task, "report", LONG, 3.0, **options)
    shop.record.wait_for(starts=1)
    second = shop.send("exclusive_again", "report", LONG, singleton_lock={"on_conflict": "retry"})
    until(lambda: second.id in shop.refused("retry"))
    shop.record.let_end("report")
    shop.record.wait_for(starts=1, job="again")
    return first, second


def assert_all_run(shop: Shop, first: AsyncResult, second: AsyncResult) -> None:
    """Both attempts of the first call run, and the other call in between."""
    until(lambda: first.id in shop.refused("retry"), "its second attempt waits")
    shop.record.let_end("again")
    assert [first.get(timeout=LIMIT), second.get(timeout=LIMIT)] == ["report"] * 2
    runs = [replace(run, job="report") for run in shop.record.runs() if run.job in ("report", "again")]
    assert [run.task_id for run in runs] == [first.id, second.id, first.id]
    assert overlaps(runs) == []


@pytest.mark.parametrize(
    "options",
    [
        {"on_conflict": "skip"},
        {"on_conflict": "join"},
        {"on_conflict": "retry", "conflict_retries": 0},
    ],
    ids=lambda options: options["on_conflict"],
)
def test_second_attempt_waits_whatever_the_policy(shop: Shop, options: dict[str, Any]) -> None:
    assert_all_run(shop, *retried_behind(shop, singleton_lock=options))


def test_calls_that_have_joined_wait_for_the_attempt_that_waits(shop: Shop) -> None:
    join = {"on_conflict": "join"}
    first, second = retried_behind(shop, singleton_lock=join)
    until(lambda: first.id in shop.refused("retry"))
    shop.record.let_end("again")
    assert [first.get(timeout=LIMIT), second.get(timeout=LIMIT)] == ["report"] * 2


def test_message_whose_worker_was_killed_waits(redis_server: RedisServer, shop_on: Callable[..., Shop]) -> None:
    shop = shop_on(redis_server, broker_transport_options=FORGETFUL)
    with redelivering(shop):
        (first,) = shop.start("first", arguments=("-Q", "mortal"))
        shop.start("second")
        killed = shop.send("late", "report", LONG, queue="mortal")
        shop.record.wait_for(starts=1)
        other = shop.send("exclusive_again", "report", LONG, singleton_lock={"on_conflict": "retry"})
        until(lambda: other.id in shop.refused("retry"))
        first.kill()
        shop.record.wait_for(starts=1, job="again")
        shop.start("third", arguments=("-Q", "mortal"))
        until(lambda: killed.id in shop.refused("retry"), "it was delivered again, and waits")
        shop.record.let_end("again")
        shop.record.let_end("report")
        assert [killed.get(timeout=LIMIT), other.get(timeout=LIMIT)] == ["report"] * 2
        assert [run.task_id for run in shop.record.runs("report")] == [killed.id] * 2
