"""A message has one end, which never changes, is reported once, and for which nobody waits forever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, chord, group
from celery.result import AsyncResult, GroupResult

from celery_singleton_lock import clock
from celery_singleton_lock.task import decide
from tests.integration.conftest import LONG, Shop, until
from tests.patience import LIMIT
from tests.redis_server import RedisServer

#: Seconds of leases: no test here waits for the end of one, and a busy machine stops no process for so long.
TTL = 60.0

#: Celery's states that do not change.
READY = {"SUCCESS", "FAILURE", "REVOKED"}

#: Seconds in which an event would happen that must not happen.
AFTERWARDS = 2.0


def again(shop: Shop, task: str, *args: Any, **options: Any) -> AsyncResult:
    """Send the same message once more, like a broker that lost the acknowledgement."""
    return shop.send(task, *args, **options)


def final(shop: Shop, result: Any) -> list[str]:
    """The states of a result and its parents, once they are final."""
    found: list[str] = []
    while result is not None:
        for each in result.results if isinstance(result, GroupResult) else [result]:
            until(lambda each=each: shop.state_of(each) in READY)
            found.append(shop.state_of(each))
        result = result.parent
    return found


class TestIdThatIsUsedAgain:
    """It is used by a program without the code of the tasks: its messages contain nothing random."""

    @pytest.fixture(autouse=True)
    def _workers(self, shop: Shop) -> None:
        shop.start("one")

    def test_rest_of_the_chain_gets_a_state(self, shop: Shop) -> None:
        step = shop.sign("exclusive", "report", immutable=True)
        step.freeze()
        for _ in range(2):
            result = chain(step, shop.sign("echo"), app=shop.app).apply_async()
            assert set(final(shop, result)) <= READY

    def test_chord_body_gets_a_state(self, shop: Shop) -> None:
        step = shop.sign("exclusive", "report", immutable=True)
        step.freeze()
        for _ in range(2):
            result = chord(group([step, shop.sign("echo", 1)], app=shop.app), shop.sign("echo"), app=shop.app)()
            assert set(final(shop, result)) <= READY

    def test_errbacks_are_called(self, shop: Shop) -> None:
        for number in range(2):
            chain(
                shop.sign("failing", "report", immutable=True).set(task_id="frozen"),
                shop.sign("echo"),
                app=shop.app,
            ).apply_async(link_error=shop.sign("mark", number, immutable=True))
            shop.record.wait_for(starts=number + 1, job="mark")


class TestForgottenResult:
    """Although the result backend has no result, a result may have been stored."""

    @pytest.mark.slow
    @pytest.mark.parametrize("forget", ["forget", "expire"])
    def test_next_task_is_not_sent_twice(
        self, redis_server: RedisServer, shop_on: Callable[..., Shop], forget: str
    ) -> None:
        shop = shop_on(redis_server, **({"result_expires": 1} if forget == "expire" else {}))
        shop.start("one")
        link = shop.sign("mark", immutable=True)
        result = shop.send("late", "report", link=link)
        assert result.get(timeout=LIMIT) == "report"
        shop.record.wait_for(starts=1, job="mark")
        if forget == "forget":
            result.forget()
        else:
            until(lambda: shop.state_of(result) == "PENDING")
        again(shop, "late", "report", link=link, task_id=result.id)
        # The copy may look once more after the time that the first execution gets.
        clock.sleep(decide.SETTLING + AFTERWARDS)
        assert len(shop.record.runs("mark")) == 1
        assert len(shop.record.runs("report")) == 1


class TestRefusedCopy:
    def test_failure_of_a_message_that_waited_is_final(self, shop: Shop) -> None:
        """It is delivered again while it waits; the second copy gets the lock after the first has failed."""
        shop.start("one", "two")
        holder = shop.send("exclusive", "report", LONG)
        shop.record.wait_for(starts=1)
        options = {"task_id": "refused", "root_id": "refused"}
        refused = shop.send("late", "report", singleton_lock={"wait": 1.0, "on_conflict": "raise"}, **options)
        again(shop, "late", "report", singleton_lock={"wait": LIMIT, "on_conflict": "raise"}, **options)
        until(lambda: shop.state_of(refused) == "FAILURE")
        shop.record.let_end("report")
        assert holder.get(timeout=LIMIT) == "report"
        clock.sleep(AFTERWARDS)
        assert [run.task_id for run in shop.record.runs("report")] == [holder.id]
        assert shop.state_of(refused) == "FAILURE"
