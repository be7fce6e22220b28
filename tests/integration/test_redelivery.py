"""Brokers deliver a message again. It is carried out once all the same, and never by nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import chord, group
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import clock
from tests.integration.conftest import FORGETFUL, LONG, Shop, quick_first, redelivering, until
from tests.patience import LIMIT
from tests.redis_server import RedisServer

#: Seconds of leases: no test here waits for the end of one, and a busy machine stops no process for so long.
TTL = 60.0

#: Seconds after which the broker of these tests takes a message for lost.
VISIBILITY = FORGETFUL["visibility_timeout"]


@pytest.fixture
def forgetful(redis_server: RedisServer, shop_on: Callable[..., Shop]) -> Iterator[Shop]:
    """A shop whose broker delivers again after three seconds."""
    shop = shop_on(redis_server, singleton_lock_ttl=TTL, task_track_started=True, broker_transport_options=FORGETFUL)
    with redelivering(shop):
        yield shop


def again(shop: Shop, task: str, *args: Any, task_id: str, **options: Any) -> None:
    """The same message once more, as by a broker that lost the acknowledgement."""
    shop.app.send_task(f"tests.integration.app.{task}", args, task_id=task_id, **options)


class TestRunningMessage:
    @pytest.mark.slow
    def test_is_run_once_though_it_is_delivered_again_and_again(self, forgetful: Shop) -> None:
        forgetful.start("one", "two", "three", concurrency=1)
        result = forgetful.send("late", "report", LONG)
        states = set()
        while not result.ready():
            states.add(result.state)
            if forgetful.log.count("a copy waits, in case it dies") > 1:
                forgetful.record.let_end("report")
            clock.sleep(0.02)
        assert result.get(timeout=LIMIT) == "report"
        assert states <= {"PENDING", "STARTED", "SUCCESS"}
        # The last copy is dropped, and nothing comes after it.
        until(lambda: any("this copy is dropped" in worker.log for worker in forgetful.workers))
        clock.sleep(VISIBILITY + 1)
        assert len(forgetful.record.runs("report")) == 1
        assert forgetful.state_of(result) == "SUCCESS"

    def test_copy_of_a_message_that_is_acknowledged_early_is_dropped(self, shop: Shop) -> None:
        shop.start("one", "two")  # With a slot that is free beside the first: a busy worker would keep the copy.
        result = shop.send("exclusive", "report", LONG)
        shop.record.wait_for(starts=1)
        again(shop, "exclusive", "report", LONG, task_id=result.id)
        until(lambda: "this copy is dropped" in shop.log)
        shop.record.let_end("report")
        assert result.get(timeout=LIMIT) == "report"
        assert len(shop.record.runs("report")) == 1

    @pytest.mark.parametrize("pool", ["prefork", "gevent"])
    def test_is_terminated_though_its_copies_wait_in_the_same_worker(self, shop: Shop, pool: str) -> None:
        """Celery looks for a task by its id, and finds the newest delivery."""
        (worker,) = shop.start("one", concurrency=2, pool=pool)
        result = shop.send("late", "report", LONG)
        shop.record.wait_for(starts=1)
        again(shop, "late", "report", LONG, task_id=result.id)
        until(lambda: "a copy waits, in case it dies" in worker.log)
        shop.app.control.revoke(result.id, terminate=True)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=LIMIT)
        until(lambda: not shop.held())
        assert len(shop.record.runs("report")) == 1
        assert shop.send("late", "report").get(timeout=LIMIT) == "report", "the other copy does not run"


class TestFinishedMessage:
    """Its worker is killed after the body, before the acknowledgement."""

    @pytest.fixture
    def two(self, forgetful: Shop) -> Shop:
        forgetful.start("one", "two", concurrency=1)
        return forgetful

    @pytest.mark.slow
    def test_returns_the_recorded_value_when_the_result_was_not_stored(self, two: Shop) -> None:
        result = two.send("late", "report", task_id="dies-unstored")
        assert result.get(timeout=LIMIT) == "report"
        assert len(two.record.runs("report")) == 1
        assert any("its recorded end is reported again" in worker.log for worker in two.workers)

    @pytest.mark.parametrize(("task", "arguments"), quick_first(("late", []), ("large", [100_000])))
    @pytest.mark.parametrize("dies", quick_first("dies", "child"))
    def test_chord_is_completed_whose_part_was_stored_and_not_counted(
        self, two: Shop, task: str, arguments: list[int], dies: str
    ) -> None:
        """Celery stores the result of a part before it counts the part, and asks no more of a child that dies then."""
        step = two.sign(task, "report", *arguments).set(task_id=f"{dies}-uncounted")
        result = chord(group([two.sign("echo", 1), step], app=two.app), two.sign("echo"), app=two.app)()
        assert result.get(timeout=LIMIT) == [1, "x" * arguments[0] if arguments else "report"]
        assert len(two.record.runs("report")) == 1
