"""A copy that joins the task with its lock ends like that task, and nobody waits forever."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import chain
from celery.result import AsyncResult

from tests.integration.conftest import LONG, Shop, kill_child, until
from tests.integration.standing import Staff
from tests.patience import LIMIT
from tests.recording import overlaps

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

    def test_is_revoked(self, shop: Shop) -> None:
        shop.start("one", "two")
        first = holder(shop)
        copy, other = join(shop, "exclusive", "report"), join(shop, "exclusive", "report")
        until_joined(shop, 2)
        shop.app.control.revoke(copy.id)
        shop.record.let_end("report")
        assert first.get(timeout=LIMIT) == other.get(timeout=LIMIT) == "report"
        until(lambda: copy.state == "REVOKED")
