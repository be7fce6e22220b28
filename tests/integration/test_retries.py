"""A message that has begun is never refused: from its second attempt on it waits, whatever the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from celery import chain
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from celery_singleton_lock import clock
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


def test_callable_is_not_asked_about_a_second_attempt(shop: Shop) -> None:
    assert_all_run(shop, *retried_behind(shop, "deciding_and_retrying"))
    assert shop.record.runs("decided") == []


@pytest.mark.parametrize("policy", ["rerun", "replace"])
def test_second_attempt_of_the_newest_call_waits(shop: Shop, policy: str) -> None:
    """Another task's call is no newer call of this one."""
    first, second = retried_behind(shop, singleton_lock={"on_conflict": policy})
    until(lambda: first.id in shop.refused(policy), "its second attempt waits")
    shop.record.let_end("again")
    assert [first.get(timeout=LIMIT), second.get(timeout=LIMIT)] == ["report"] * 2


def test_calls_that_have_joined_wait_for_the_attempt_that_waits(shop: Shop) -> None:
    join = {"on_conflict": "join"}
    first, second = retried_behind(shop, singleton_lock=join)
    until(lambda: first.id in shop.refused("retry"))
    shop.record.let_end("again")
    assert [first.get(timeout=LIMIT), second.get(timeout=LIMIT)] == ["report"] * 2


def test_next_step_of_a_chain_comes_after_the_attempt_that_waited(shop: Shop) -> None:
    shop.start("one", "two", concurrency=3)
    step = shop.sign("retrying_when_told", "report", LONG, 3.0)
    last = chain(step, shop.sign("echo")).delay()
    shop.record.wait_for(starts=1)
    second = shop.send("exclusive_again", "report", LONG, singleton_lock={"on_conflict": "retry"})
    until(lambda: second.id in shop.refused("retry"))
    shop.record.let_end("report")
    shop.record.wait_for(starts=1, job="again")
    until(lambda: last.parent.id in shop.refused("retry"))
    shop.record.let_end("again")
    assert last.get(timeout=LIMIT) == "report"


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


class TestKeptLock:
    """`lock_retain_on_retry`: the lock is kept until the next attempt comes, however late."""

    def test_lasts_until_a_late_retry_begins(self, redis_server: RedisServer, shop_on: Callable[..., Shop]) -> None:
        """A worker has no room for the message of the retry, which stays in the queue behind others."""
        shop = shop_on(redis_server, singleton_lock_ttl=3.0)
        shop.start("full", arguments=("-Q", "full"), concurrency=1)
        shop.start("idle")
        first = shop.send("retaining", "report", 0.1, queue="full")
        blockers = [shop.send("plain", "blocker", LONG, queue="full") for _ in range(3)]
        shop.record.wait_for(ends=1, job="report")
        shop.record.wait_for(starts=1, job="blocker")
        clock.sleep(5.0)  # Countdown and lease are over.
        with pytest.raises(TaskRevokedError, match=first.id):
            shop.send("exclusive", "report").get(timeout=LIMIT)
        shop.record.let_end("blocker")
        assert first.get(timeout=LIMIT) == "report"
        assert [blocker.get(timeout=LIMIT) for blocker in blockers] == ["blocker"] * 3
        assert {run.task_id for run in shop.record.runs("report")} == {first.id}
        assert shop.send("exclusive", "report").get(timeout=LIMIT) == "report"
