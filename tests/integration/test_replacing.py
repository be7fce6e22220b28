"""`on_duplicate="replace"`: the newest message runs instead of a waiting one, which ends when a worker gets it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery import chain, states
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from celery_singleton_lock import LockSuperseded
from tests.integration.conftest import LONG, Shop, quick_first
from tests.integration.queued_tasks import define
from tests.integration.test_queued import start, until_can_be_sent
from tests.patience import LIMIT
from tests.recording import overlaps

JOBS = quick_first("newest", "newest_alone")


@pytest.fixture
def tasks(shop: Shop) -> SimpleNamespace:
    return define(shop.app)


@pytest.fixture(params=JOBS)
def job(request: pytest.FixtureRequest, tasks: SimpleNamespace) -> Any:
    return getattr(tasks, request.param)


def ran(shop: Shop, job: str = "report") -> set[str]:
    """The ids of the messages that ran."""
    return {run.task_id for run in shop.record.runs(job)}


def is_superseded(result: AsyncResult, by: AsyncResult) -> bool:
    with pytest.raises(TaskRevokedError) as raised:
        result.get(timeout=LIMIT)
    return result.state == states.REVOKED and by.id in str(raised.value) and isinstance(raised.value, LockSuperseded)


def test_last_of_many_runs(shop: Shop, job: Any) -> None:
    *old, newest = [job.delay("report") for _ in range(10)]
    assert len({result.id for result in [*old, newest]}) == 10
    start(shop)
    assert newest.get(timeout=LIMIT) == "report"
    assert all(is_superseded(result, newest) for result in old)
    assert ran(shop) == {newest.id}
    until_can_be_sent(shop)


def test_one_runs_and_the_newest_waits(shop: Shop, tasks: SimpleNamespace) -> None:
    start(shop)
    running = tasks.newest_alone.delay("report", LONG)
    shop.record.wait_for(starts=1)
    *old, newest = [tasks.newest_alone.delay("report") for _ in range(5)]
    shop.record.let_end("report")
    assert running.get(timeout=LIMIT) == newest.get(timeout=LIMIT) == "report"
    assert [result.status for result in [running, newest]] == [states.SUCCESS] * 2
    assert all(isinstance(result.get(timeout=LIMIT, propagate=False), TaskRevokedError) for result in old)
    assert ran(shop) == {running.id, newest.id}
    assert overlaps(shop.record.runs("report")) == []


def test_first_step_of_a_chain(shop: Shop, job: Any) -> None:
    last = chain(job.si("report"), job.si("after")).apply_async()
    newest = job.delay("report")
    start(shop)
    assert newest.get(timeout=LIMIT) == "report"
    with pytest.raises(TaskRevokedError):
        last.get(timeout=LIMIT)
    with pytest.raises(TaskRevokedError):
        last.parent.get(timeout=LIMIT)
    assert ran(shop, "after") == set()
