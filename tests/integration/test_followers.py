"""A part of a canvas whose lock another message has: it ends like that message, and the canvas goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery import chain, chord, group
from celery.result import AsyncResult

from celery_singleton_lock.options.rules import SCOPES, WHILE_EXECUTING
from tests.integration.conftest import LONG, Shop, kill_child, quick_first, until
from tests.integration.queued_tasks import define
from tests.integration.test_queued import start, until_can_be_sent
from tests.patience import LIMIT
from tests.recording import overlaps

#: Seconds of leases: no test here waits for the end of one, and a busy machine stops no process for so long.
TTL = 60.0

QUEUED = quick_first("until_executed", *(it for it in SCOPES if it not in ("until_executed", WHILE_EXECUTING)))


@pytest.fixture
def tasks(shop: Shop) -> SimpleNamespace:
    return define(shop.app)


def value(result: AsyncResult) -> Any:
    return result.get(timeout=LIMIT)


def running(shop: Shop, job: Any) -> AsyncResult:
    """Send a message that runs until the test lets it end."""
    result = job.delay("report", LONG)
    shop.record.wait_for(starts=1, job="report")
    return result


def until_followed(shop: Shop, times: int = 1) -> None:
    until(lambda: shop.log.count("is a duplicate, and follows") >= times)


def come(shop: Shop) -> None:
    """Let workers take the messages in another queue from now on."""
    shop.app.control.add_consumer("another")


def ends_all(shop: Shop) -> None:
    shop.record.let_end("report")


def runs(shop: Shop, job: str = "report") -> int:
    return len(shop.record.runs(job))


class TestPlaces:
    """Wherever the part is in a canvas."""

    @pytest.mark.parametrize("scope", QUEUED)
    def test_group_of_equal_parts_runs_once(self, shop: Shop, tasks: SimpleNamespace, scope: str) -> None:
        job = tasks.who[scope]
        result = group(job.si("report", 0.5) for _ in range(4)).apply_async()
        ids = {part.id for part in result.results}
        start(shop, "one", "two")
        (found,) = set(value(result))
        assert found in ids
        assert runs(shop) == 1

    @pytest.mark.parametrize("place", ["first", "middle", "last"])
    @pytest.mark.parametrize("scope", QUEUED)
    def test_step_of_a_chain(self, shop: Shop, tasks: SimpleNamespace, scope: str, place: str) -> None:
        job, other = tasks.who[scope], tasks.while_executing
        first = job.apply_async(("report",), queue="another")
        before = [other.si("before")] if place != "first" else []
        after = [tasks.echo.s()] if place != "last" else []
        start(shop, concurrency=2)
        result = chain(*before, job.si("report"), *after).apply_async()
        until_followed(shop)
        come(shop)
        assert value(result) == first.id
        assert runs(shop) == 1
        assert runs(shop, "echo") == len(after)

    @pytest.mark.parametrize("scope", QUEUED)
    def test_header_of_a_chord(self, shop: Shop, tasks: SimpleNamespace, scope: str) -> None:
        job = tasks.who[scope]
        first = job.apply_async(("report",), queue="another")
        start(shop, concurrency=2)
        parts = [job.si("report"), job.si("report"), tasks.while_executing.si("other")]
        result = chord(parts, tasks.echo.s()).apply_async()
        until_followed(shop, 2)
        come(shop)
        assert value(result) == [first.id, first.id, "other"]
        assert runs(shop) == 1

    @pytest.mark.parametrize("how", ["link", "link_error"])
    def test_call_with_callbacks(self, shop: Shop, tasks: SimpleNamespace, how: str) -> None:
        start(shop, concurrency=2)
        job = tasks.who["until_executed"] if how == "link" else tasks.fails
        first = running(shop, job)
        callback = tasks.echo.s() if how == "link" else tasks.echo.si("failed")
        second = job.apply_async(("report",), **{how: callback})
        until_followed(shop)
        ends_all(shop)
        assert second.id != first.id
        assert second.get(timeout=LIMIT, propagate=False) is not None
        shop.record.wait_for(starts=1, job="echo")
        assert second.state == first.state
        assert runs(shop) == 1


class TestLeaderIsGone:
    """One of its followers runs, and the others end like that follower."""

    @pytest.fixture(params=quick_first("until_executed", "until_executing", "until_and_while_executing"))
    def job(self, tasks: SimpleNamespace, request: pytest.FixtureRequest) -> Any:
        return tasks.who[request.param]

    def test_killed_as_it_runs(self, shop: Shop, tasks: SimpleNamespace) -> None:
        start(shop, "one", "two", concurrency=2)
        job = tasks.who["until_executed"]
        first = running(shop, job)
        result = group(job.si("report", 0.5) for _ in range(3)).apply_async()
        until_followed(shop, 3)
        (run,) = shop.record.runs("report")
        killed_at = kill_child(run)
        found = value(result)
        assert len(set(found)) == 1
        assert first.id not in found
        assert runs(shop) == 2
        assert overlaps(shop.record.runs("report", killed_at=killed_at)) == []
        until_can_be_sent(shop)


class TestFollower:
    def test_takes_no_slot(self, shop: Shop, tasks: SimpleNamespace) -> None:
        start(shop, concurrency=2)
        job = tasks.who["until_executed"]
        first = running(shop, job)
        result = group(job.si("report") for _ in range(10)).apply_async()
        until_followed(shop, 10)
        assert value(tasks.while_executing.delay("other")) == "other"
        ends_all(shop)
        assert value(result) == [first.id] * 10
        assert runs(shop) == 1
