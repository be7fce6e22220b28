"""A copy that joins the task with its lock ends like that task, and nobody waits forever."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import chain
from celery.result import AsyncResult

from celery_singleton_lock import LockLost, clock
from tests.integration.conftest import FORGETFUL, LONG, Shop, kill_child, redelivering, until
from tests.integration.standing import Staff
from tests.patience import LIMIT
from tests.recording import overlaps
from tests.redis_server import RedisServer

JOIN = {"singleton_lock": {"on_conflict": "join"}}


@pytest.fixture
def shop(staff: Staff) -> Iterator[Shop]:
    with staff.shop(singleton_lock_ttl=60.0) as shop:
        yield shop


def join(shop: Shop, task: str, *args: Any, **options: Any) -> AsyncResult:
    return shop.send(task, *args, headers=JOIN, **options)


def signed(shop: Shop, task: str, *args: Any) -> Any:
    return shop.sign(task, *args, immutable=True).set(headers=JOIN)


def holder(shop: Shop, task: str = "exclusive", *args: Any, **options: Any) -> AsyncResult:
    """Send a task that has the lock of "report" until the test lets it end."""
    result = shop.send(task, "report", *(args or (LONG,)), headers=JOIN, **options)
    shop.record.wait_for(starts=1, job="report")
    return result


def until_joined(shop: Shop, copies: int) -> None:
    until(lambda: len(shop.refused("join")) >= copies)


class TestHolderEnds:
    def test_all_copies_end_as_it_does(self, shop: Shop) -> None:
        shop.start("one", "two")
        first = holder(shop)
        copies = [join(shop, "exclusive", "report") for _ in range(20)]
        until_joined(shop, 20)
        # They take no slot: another task runs meanwhile.
        assert shop.send("exclusive", "other").get(timeout=LIMIT) == "other"
        shop.record.let_end("report")
        assert [copy.get(timeout=LIMIT) for copy in [first, *copies]] == ["report"] * 21
        assert len(shop.record.runs("report")) == 1
        assert {copy.state for copy in copies} == {"SUCCESS"}

    def test_after_a_replacement(self, shop: Shop) -> None:
        shop.start("one", "two")
        first = holder(shop, "replaced_when_told", LONG, 1.0)
        copies = [join(shop, "replaced_when_told", "report", LONG, 1.0) for _ in range(3)]
        until_joined(shop, 3)
        shop.record.let_end("report")
        assert [copy.get(timeout=LIMIT) for copy in [first, *copies]] == ["after"] * 4
        assert len(shop.record.runs("report")) == 1
        assert len(shop.record.runs("after")) == 1

    def test_while_another_task_takes_the_lock(self, shop: Shop) -> None:
        """The copies have their end, and do not wait for the other task."""
        shop.start("one", "two", concurrency=2)
        first = holder(shop)
        copies = [join(shop, "exclusive", "report") for _ in range(5)]
        until_joined(shop, 5)
        next_one = shop.send("exclusive_again", "report", LONG, singleton_lock={"wait": 300})
        until(lambda: any(":waiting" in key for key in shop.keys()))  # noqa: SIM118 - no dictionary
        shop.record.let_end("report")
        assert [copy.get(timeout=LIMIT) for copy in [first, *copies]] == ["report"] * 6
        shop.record.wait_for(starts=1, job="again")
        assert not next_one.ready()
        shop.record.let_end("again")
        assert next_one.get(timeout=LIMIT) == "report"

    def test_and_its_lock_is_kept_for_a_while(self, shop: Shop) -> None:
        """`lock_at_least_for`: a copy that comes meanwhile gets the end at once."""
        shop.start("one", "two")
        call = {"at_least_for": 300.0, "on_conflict": "join"}
        assert shop.send("exclusive", "report", singleton_lock=call).get(timeout=LIMIT) == "report"
        assert shop.send("exclusive", "report", singleton_lock=call).get(timeout=LIMIT) == "report"
        assert len(shop.record.runs("report")) == 1


class TestHolderDies:
    @pytest.mark.parametrize("task", ["exclusive", "rejected_when_lost"])
    def test_one_copy_runs(self, shop: Shop, task: str) -> None:
        shop.start("one", "two")
        first = holder(shop, task)
        copies = [join(shop, task, "report", 0.5) for _ in range(5)]
        until_joined(shop, 5)
        (run,) = shop.record.runs("report")
        killed_at = kill_child(run)
        assert [copy.get(timeout=LIMIT) for copy in copies] == ["report"] * 5
        if task == "rejected_when_lost":
            assert first.get(timeout=LIMIT) == "report"
        runs = shop.record.runs("report", killed_at=killed_at)
        assert overlaps(runs) == []
        done = [run for run in runs if run.outcome == "done"]
        assert len([run for run in done if run.task_id != first.id]) <= 1
        assert done

    def test_host_that_is_gone(self, redis_server: RedisServer, shop_on: Callable[..., Shop]) -> None:
        shop = shop_on(redis_server, singleton_lock_ttl=2.0, broker_transport_options=FORGETFUL)
        one, two = shop.start("one", "two", concurrency=2)
        holder(shop)
        copies = [join(shop, "exclusive", "report", 0.05) for _ in range(8)]
        until_joined(shop, 8)
        (run,) = shop.record.runs("report")
        victim = one if os.getpgid(run.pid) == one.process.pid else two
        killed_at = clock.now()
        victim.kill()
        with redelivering(shop):  # The dead worker may have all copies.
            until(lambda: any(copy.ready() for copy in copies))
        assert overlaps(shop.record.runs("report", killed_at=killed_at)) == []

    @pytest.mark.parametrize("countdown", [0.0, 1.0])
    def test_revoked_between_two_attempts(self, shop: Shop, countdown: float) -> None:
        """Its next attempt never begins, so nobody waits for it. (Celery may store REVOKED, and RETRY over it.)"""
        shop.start("one", "two")
        first = holder(shop, "retrying_when_told", LONG, countdown)
        copies = [join(shop, "retrying_when_told", "report", 0.0, 0.0) for _ in range(3)]
        until_joined(shop, 3)
        shop.app.control.revoke(first.id)
        until(lambda: shop.log.count(f"flagged as revoked: {first.id}") == 2)
        shop.record.let_end("report")
        assert [copy.get(timeout=LIMIT) for copy in copies] == ["report"] * 3
        assert len({run.task_id for run in shop.record.runs("report")}) == 2


class TestOperator:
    """`celery control release_lock` takes the lock from the holder, which is stopped, or goes on (`on_lock_lost`)."""

    @pytest.fixture
    def shop(self, redis_server: RedisServer, shop_on: Callable[..., Shop]) -> Shop:
        return shop_on(redis_server, singleton_lock_ttl=60.0)

    def release(self, shop: Shop) -> None:
        """Have the workers take the lock from its holder, once the worker that runs it knows that it has it."""
        (key,) = shop.held()
        until(lambda: any("is stopped" in told or "goes on" in told for told in self.told(shop, key)))

    def told(self, shop: Shop, key: str) -> list[str]:
        replies = shop.app.control.release_lock(key.removesuffix(":run"), reply=True, timeout=1.0)
        return [answer.get("ok", "") for reply in replies for answer in reply.values()]

    def test_calls_wait_for_the_holder_to_be_gone(self, shop: Shop) -> None:
        """Joined calls, and those that come while it stops, wait, and one of them runs."""
        shop.start("one", "two", concurrency=3)
        first = holder(shop, "slow_to_stop", LONG, 2.0)
        before = [join(shop, "slow_to_stop", "report", 0.05, 0.0) for _ in range(3)]
        until_joined(shop, 3)
        self.release(shop)
        after = [join(shop, "slow_to_stop", "report", 0.05, 0.0) for _ in range(3)]
        assert [call.get(timeout=LIMIT) for call in [*before, *after]] == ["report"] * 6
        with pytest.raises(LockLost, match="an operator has released it"):
            first.get(timeout=LIMIT)
        runs = shop.record.runs("report")
        assert overlaps(runs) == []
        assert len(runs) == 2


class TestJoinedCopy:
    def test_chain_and_callbacks_go_on(self, shop: Shop) -> None:
        shop.start("one", "two", concurrency=3)
        first = holder(shop)
        result = chain(
            shop.sign("echo", 1), signed(shop, "exclusive", "report"), shop.sign("echo"), app=shop.app
        ).apply_async(link=shop.sign("mark"))
        until_joined(shop, 1)
        shop.record.let_end("report")
        assert result.get(timeout=LIMIT) == first.get(timeout=LIMIT) == "report"
        shop.record.wait_for(starts=1, job="mark")
        assert len(shop.record.runs("report")) == 1

    def test_is_delivered_again(self, redis_server: RedisServer, shop_on: Callable[..., Shop]) -> None:
        """Its deliveries end as one: its callback is sent once."""
        shop = shop_on(redis_server, singleton_lock_ttl=60.0, broker_transport_options=FORGETFUL)
        with redelivering(shop):
            shop.start("one", "two", concurrency=3)
            holder(shop, "late")
            copy = join(shop, "late", "report", link=shop.sign("mark"))
            until_joined(shop, 1)
            # The same message again, as from a broker that has lost the acknowledgement.
            for _ in range(3):
                join(shop, "late", "report", link=shop.sign("mark"), task_id=copy.id, root_id=copy.id)
            until(lambda: shop.log.count("on_conflict=join") >= 4)  # They have one id.
            shop.record.let_end("report")
            assert copy.get(timeout=LIMIT) == "report"
            shop.record.wait_for(starts=1, job="mark")
            clock.sleep(FORGETFUL["visibility_timeout"] + 2)
        assert len(shop.record.runs("report")) == 1
        assert len(shop.record.runs("mark")) == 1

    def test_expires(self, shop: Shop) -> None:
        shop.start("one", "two")
        first = holder(shop)
        copy = join(shop, "exclusive", "report", expires=1.0)
        until(lambda: copy.state == "REVOKED")
        shop.record.let_end("report")
        assert first.get(timeout=LIMIT) == "report"

    def test_is_revoked(self, shop: Shop) -> None:
        shop.start("one", "two")
        first = holder(shop)
        copy, other = join(shop, "exclusive", "report"), join(shop, "exclusive", "report")
        until_joined(shop, 2)
        shop.app.control.revoke(copy.id)
        shop.record.let_end("report")
        assert first.get(timeout=LIMIT) == other.get(timeout=LIMIT) == "report"
        until(lambda: copy.state == "REVOKED")

    def test_its_worker_is_shut_down(self, shop: Shop) -> None:
        """Another worker gets it from the broker."""
        shop.start("one", "two")
        first = holder(shop)
        copies = [join(shop, "exclusive", "report") for _ in range(5)]
        until_joined(shop, 5)
        (run,) = shop.record.runs("report")
        idle = next(worker for worker in shop.workers if worker.process.pid != os.getpgid(run.pid))
        shop.start("three")
        idle.terminate()
        shop.record.let_end("report")
        assert [copy.get(timeout=LIMIT) for copy in [first, *copies]] == ["report"] * 6
        assert len(shop.record.runs("report")) == 1
