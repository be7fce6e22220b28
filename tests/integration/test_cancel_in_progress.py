"""A newer message stops the older one that runs: `on_conflict="replace"`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from billiard.exceptions import WorkerLostError
from celery.result import AsyncResult

from tests.integration.conftest import FORGETFUL, LONG, POOLS, Shop, redelivering, until
from tests.integration.standing import Staff
from tests.integration.test_newest import is_superseded_by
from tests.patience import LIMIT
from tests.recording import overlaps
from tests.servers import RedisServer

#: Seconds of leases: long enough that none ends within a test, and short enough that several do.
TTL, BRIEF = 600.0, 3.0

REPLACE = {"on_conflict": "replace"}


@pytest.fixture
def shop(staff: Staff) -> Iterator[Shop]:
    with staff.shop(singleton_lock_ttl=TTL) as shop:
        yield shop


@pytest.fixture
def brief(shop_on: Callable[..., Shop], redis_server: RedisServer) -> Shop:
    return shop_on(redis_server, singleton_lock_ttl=BRIEF)


def send(shop: Shop, task: str, *args: Any, **options: Any) -> AsyncResult:
    result: AsyncResult = shop.send(task, "report", *args, singleton_lock=REPLACE, **options)
    return result


def running(shop: Shop, task: str = "replacing", **options: Any) -> AsyncResult:
    """Send a message that runs until it is stopped."""
    before = len(shop.record.runs())
    result = send(shop, task, LONG, **options)
    shop.record.wait_for(starts=before + 1)
    return result


def ran(shop: Shop) -> list[tuple[str, str]]:
    """The ids of the runs in order, and how each ended."""
    runs = shop.record.runs("report")
    assert overlaps(runs) == []
    return [(run.task_id, run.outcome) for run in runs]


class TestAtOnce:
    """The renewal that says so comes within a second."""

    @pytest.mark.parametrize("pool", POOLS)
    def test_holder_is_stopped_and_the_newest_runs(self, shop: Shop, pool: str) -> None:
        # A worker with the pool `solo` does nothing else while it runs a task.
        shop.start("one", "two", pool=pool)
        holder = running(shop)
        newest = send(shop, "replacing")
        assert newest.get(timeout=LIMIT) == "report"
        assert is_superseded_by(holder, newest)
        assert ran(shop) == [(holder.id, "aborted"), (newest.id, "done")]


class TestAtARenewal:
    @pytest.mark.parametrize("task", ["replacing_late", "holding_gil"])
    def test_child_that_cannot_stop_is_killed(self, brief: Shop, task: str) -> None:
        """It is frozen, or runs C code that lets no other thread of its process run."""
        brief.start("one", "two")
        holder = send(brief, task, int(LONG))
        (run,) = brief.record.wait_for(starts=1)
        if task == "replacing_late":
            os.kill(run.pid, signal.SIGSTOP)
        newest = send(brief, task, 0)
        assert newest.get(timeout=LIMIT) == "report"
        assert "does not end although it is superseded; killing it" in brief.log
        if task == "replacing_late":
            assert is_superseded_by(holder, newest)
        else:
            with pytest.raises(WorkerLostError):
                holder.get(timeout=LIMIT)
        assert [run.task_id for run in brief.record.runs("report")] == [holder.id, newest.id]

    def test_worker_that_is_killed_before_it_stops_its_task(self, redis_server: RedisServer, shop_on: Any) -> None:
        shop = shop_on(redis_server, singleton_lock_ttl=12.0, broker_transport_options=FORGETFUL)
        (killed,) = shop.start("killed", arguments=("-Q", "held"))
        holder = running(shop, "replacing_late", queue="held")
        shop.start("staying", arguments=("-Q", "celery,held"))
        killed.pause()  # It does not learn of the newest.
        newest = send(shop, "replacing_late", LONG)
        until(lambda: newest.id in shop.refused("replace"))
        killed.kill()
        until(lambda: len(shop.record.runs("report")) == 2)
        with redelivering(shop):
            assert is_superseded_by(holder, newest)
        shop.record.let_end("report")
        assert newest.get(timeout=LIMIT) == "report"
