"""A newer message stops the older one that runs: `on_conflict="replace"`."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from billiard.exceptions import WorkerLostError
from celery.result import AsyncResult
from celery.utils import uuid

from celery_singleton_lock import clock
from tests.conftest import LASTING
from tests.integration.conftest import FORGETFUL, LONG, POOLS, Shop, kill_child, redelivering, until
from tests.integration.queued_tasks import define
from tests.integration.standing import Staff
from tests.integration.test_newest import is_superseded_by
from tests.integration.test_queued import queued, start
from tests.patience import LIMIT
from tests.recording import overlaps
from tests.servers import Cluster, RedisServer, SentinelGroup

#: Seconds of leases: long enough that none ends within a test, and short enough that several do.
TTL, BRIEF = 600.0, 3.0

REPLACE = {"on_conflict": "replace"}

#: Servers other than a single Redis where the order of messages is known.
SENTINELS = pytest.param("sentinels", marks=pytest.mark.xdist_group(LASTING["lasting_sentinels"]))
CLUSTER = pytest.param("cluster", marks=pytest.mark.xdist_group(LASTING["lasting_cluster"]))


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

    @pytest.mark.parametrize("how", ["fork", "multiprocessing"])
    def test_process_that_a_body_forks_leaves_the_connections_to_its_parent(self, shop: Shop, how: str) -> None:
        (worker,) = shop.start("one")
        result = shop.send("forking", "report", how, child := uuid())
        shop.record.wait_for(starts=1)
        with shop.locks() as locks:

            def connections() -> set[str]:
                return {each["id"] for each in locks.client_list() if each["db"] == "2"}

            before, held = connections(), shop.held()
            shop.record.let_end("fork")
            shop.record.wait_for(starts=1, job="forked")
            assert before <= connections()
            assert shop.held() == held != []
        newer = shop.send("forking", "report", how, uuid())
        assert is_superseded_by(result, newer)
        shop.record.let_end("report")
        assert newer.get(timeout=LIMIT) == "report"
        assert AsyncResult(child, app=shop.app).get(timeout=LIMIT) == "marked", "the child could send"
        assert "Traceback" not in worker.log
        assert "could not start" not in worker.log

    @pytest.mark.parametrize("pool", POOLS)
    def test_holder_is_stopped_and_the_newest_runs(self, shop: Shop, pool: str) -> None:
        # A worker with the pool `solo` does nothing else while it runs a task.
        shop.start("one", "two", pool=pool)
        holder = running(shop)
        newest = send(shop, "replacing")
        assert newest.get(timeout=LIMIT) == "report"
        assert is_superseded_by(holder, newest)
        assert ran(shop) == [(holder.id, "aborted"), (newest.id, "done")]

    def test_each_run_is_stopped_for_the_next(self, shop: Shop) -> None:
        shop.start("one", "two")
        results = [running(shop) for _ in range(5)]
        newest = send(shop, "replacing")
        assert newest.get(timeout=LIMIT) == "report"
        for older, newer in zip(results, [*results[1:], newest], strict=True):
            assert is_superseded_by(older, newer)
        assert ran(shop) == [*((result.id, "aborted") for result in results), (newest.id, "done")]

    @pytest.mark.slow
    @pytest.mark.parametrize("task", ["replacing", "replacing_late"])
    def test_flood_of_runs_of_all_lengths(self, brief: Shop, task: str) -> None:
        """Runs are stopped as they begin, run and end; some die."""
        brief.start("one", "two", concurrency=4)
        chance = random.Random(task)
        results = []
        for _ in range(150):
            results.append(send(brief, task, chance.choice([0.0, 0.01, 0.05, 0.2, LONG])))
            clock.sleep(chance.choice([0.0, 0.0, 0.02, 0.1]))
            if chance.random() < 0.05 and (runs := [run for run in brief.record.runs() if run.outcome == "open"]):
                with suppress(ProcessLookupError):
                    kill_child(runs[-1])
        # The newest message is the one that a worker began last.
        brief.record.let_end("report")
        until(lambda: all(result.ready() for result in results))
        killed = {result.id for result in results if result.state == "FAILURE"}
        states = {result.id: result.state for result in results if result.id not in killed}
        assert {*states.values()} <= {"REVOKED", "SUCCESS"}
        runs = [run for run in brief.record.runs("report") if run.outcome != "open"]
        assert overlaps(runs) == []
        done = {run.task_id for run in runs if run.outcome == "done"}
        assert {id for id, state in states.items() if state == "SUCCESS"} <= done

    @pytest.mark.parametrize("group", [SENTINELS, CLUSTER], indirect=True)
    def test_servers(
        self, group: SentinelGroup | Cluster, redis_server: RedisServer, shop_on: Callable[..., Shop]
    ) -> None:
        shop = shop_on(
            redis_server,
            singleton_lock_backend=group.url,
            singleton_lock_transport_options=getattr(group, "options", {}),
            singleton_lock_ttl=TTL,
        )
        shop.start("one", "two")
        holder = running(shop)
        newest = send(shop, "replacing")
        assert newest.get(timeout=LIMIT) == "report"
        assert is_superseded_by(holder, newest)


class TestAtARenewal:
    def test_holder_that_does_not_end_is_killed(self, brief: Shop) -> None:
        brief.start("one", "two")
        holder = running(brief, "stubborn", acks_late=True)
        newest = send(brief, "stubborn", 0.1)
        assert newest.get(timeout=LIMIT) == "report"
        with pytest.raises(Exception, match="SIGKILL"):
            holder.get(timeout=LIMIT)
        first, second = brief.record.runs("report", killed_at=0.0)
        assert (first.task_id, second.task_id) == (holder.id, newest.id)
        assert "does not end although it is superseded" in brief.log

    def test_child_that_is_frozen_for_a_moment(self, shop: Shop) -> None:
        shop.start("one", "two")
        holder = running(shop)
        (run,) = shop.record.runs("report")
        os.kill(run.pid, signal.SIGSTOP)
        newest = send(shop, "replacing")
        until(lambda: newest.id in shop.refused("replace"))
        assert shop.held() != []
        os.kill(run.pid, signal.SIGCONT)
        assert newest.get(timeout=LIMIT) == "report"
        assert is_superseded_by(holder, newest)
        assert ran(shop) == [(holder.id, "aborted"), (newest.id, "done")]

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


class TestNotStopped:
    def test_another_task_under_the_same_lock(self, shop: Shop) -> None:
        shop.start("one", "two")
        holder = shop.send("exclusive", "report", LONG)
        shop.record.wait_for(starts=1)
        newest = send(shop, "replacing")
        until(lambda: newest.id in shop.refused("replace"))
        shop.record.let_end("report")
        assert holder.get(timeout=LIMIT) == newest.get(timeout=LIMIT) == "report"
        assert ran(shop) == [(holder.id, "done"), (newest.id, "done")]


def test_lock_that_was_taken_for_the_message_ends_with_it(
    shop_on: Callable[..., Shop], redis_server: RedisServer
) -> None:
    """A message that is sent without a lock stops the run; then the next one can be sent."""
    shop = shop_on(redis_server, singleton_lock_ttl=TTL)
    start(shop, "one", "two")
    task = define(shop.app).who["until_executed"]
    holder = task.apply_async(("report", LONG), singleton_lock=REPLACE)
    shop.record.wait_for(starts=1)
    headers = {"singleton_lock": REPLACE}
    newest = shop.app.send_task(task.name, ("report",), headers=headers)
    assert newest.get(timeout=LIMIT) == newest.id
    assert is_superseded_by(holder, newest)
    until(lambda: not queued(shop))
    following = task.apply_async(("report",))
    assert following.get(timeout=LIMIT) == following.id
