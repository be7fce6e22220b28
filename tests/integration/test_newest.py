"""Of the messages that wait for a lock, only the newest runs: `on_conflict="rerun"`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from celery import chain
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from celery_singleton_lock import LockSuperseded
from tests.integration.conftest import FORGETFUL, LONG, Shop, kill_child, redelivering, until
from tests.integration.standing import Staff
from tests.patience import LIMIT
from tests.recording import overlaps
from tests.servers import RedisServer

#: Seconds of leases: longer than a busy machine stops a process for.
TTL = 60.0


@pytest.fixture
def shop(staff: Staff) -> Iterator[Shop]:
    with staff.shop(singleton_lock_ttl=TTL) as shop:
        yield shop


def waiting(shop: Shop, task: str = "rerunning", job: str = "report", **options: object) -> AsyncResult:
    """Send a message that meets the lock, and waits."""
    result: AsyncResult = shop.send(task, job, **options)
    until(lambda: result.id in shop.refused("rerun"))
    return result


def ran(shop: Shop, job: str = "report") -> list[str]:
    """The ids of the runs, in order."""
    runs = shop.record.runs(job)
    assert overlaps(runs) == []
    return [run.task_id for run in runs]


def is_superseded_by(result: AsyncResult, newest: AsyncResult) -> bool:
    with pytest.raises(LockSuperseded) as caught:
        result.get(timeout=LIMIT)
    assert isinstance(caught.value, TaskRevokedError)
    assert result.state == "REVOKED"
    return bool(caught.value.task_id == newest.id)


class TestManyCome:
    def test_they_become_one_further_run_with_the_newest_arguments(self, shop: Shop) -> None:
        shop.start("one", "two")
        holder = shop.send("rerunning", "report", LONG)
        shop.record.wait_for(starts=1)
        *older, newest = [waiting(shop) for _ in range(5)]
        shop.record.let_end("report")
        assert newest.get(timeout=LIMIT) == holder.get(timeout=LIMIT) == "report"
        for result in older:
            with pytest.raises(LockSuperseded):
                result.get(timeout=LIMIT)
        assert ran(shop) == [holder.id, newest.id]


class TestNothingIsLost:
    def test_holder_is_killed(self, shop: Shop) -> None:
        shop.start("one", "two")
        shop.send("rerunning", "report", LONG)
        (run,) = shop.record.wait_for(starts=1)
        older, newest = waiting(shop), waiting(shop)
        shop.record.let_end("other")
        kill_child(run)
        until(lambda: len(shop.record.runs("report")) == 2)
        shop.record.let_end("report")
        assert newest.get(timeout=LIMIT) == "report"
        assert is_superseded_by(older, newest)

    def test_worker_with_the_newest_is_killed(self, redis_server: RedisServer, shop_on: Callable[..., Shop]) -> None:
        """Acknowledged late: a message that was just woken, to end or to ask again, is not lost with its worker."""
        shop = shop_on(redis_server, singleton_lock_ttl=TTL, broker_transport_options=FORGETFUL)
        shop.start("holding", arguments=("-Q", "held"))
        holder = shop.send("rerunning_late", "report", LONG, queue="held")
        shop.record.wait_for(starts=1)
        (killed,) = shop.start("killed")
        older, newest = waiting(shop, "rerunning_late"), waiting(shop, "rerunning_late")
        # None is on its way: kombu would lose it with the killed worker.
        until(lambda: all(shop.log.count(f"[{result.id}] received") > 1 for result in (older, newest)))
        killed.kill()
        shop.start("staying")
        shop.record.let_end("report")
        with redelivering(shop):
            assert newest.get(timeout=LIMIT) == "report"
            assert is_superseded_by(older, newest)
        assert ran(shop) == [holder.id, newest.id]


class TestNobodyWaitsForever:
    def test_rest_of_the_chain(self, shop: Shop) -> None:
        shop.start("one", "two")
        shop.send("rerunning", "report", LONG)
        shop.record.wait_for(starts=1)
        older = chain(shop.sign("rerunning", "report"), shop.sign("mark")).apply_async()
        until(lambda: "on_conflict=rerun" in shop.log)
        newest = waiting(shop)
        assert is_superseded_by(older.parent, newest)
        until(lambda: older.state == "REVOKED")
        shop.record.let_end("report")
        assert newest.get(timeout=LIMIT) == "report"
        assert shop.record.runs("mark") == []
