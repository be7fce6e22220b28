"""Locks that are taken when messages are sent: held while these wait, and free when they have ended in any way."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from celery import states
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from celery_singleton_lock import DuplicateResult, SingletonTask
from tests.integration.conftest import LONG, Shop, quick_first, until
from tests.integration.queued_tasks import define
from tests.patience import LIMIT
from tests.recording import overlaps

#: Seconds of leases.
TTL = 6.0


@pytest.fixture
def tasks(shop: Shop) -> SimpleNamespace:
    return define(shop.app)


def start(shop: Shop, *names: str, **options: Any) -> Any:
    return shop.start(*(names or ("one",)), app="tests.integration.queued_app", **options)


def is_sent(result: AsyncResult) -> bool:
    return not isinstance(result, DuplicateResult)


def queued(shop: Shop) -> list[str]:
    """The locks of messages."""
    return [key for key in shop.held() if ":queue" in key]


def until_can_be_sent(shop: Shop) -> None:
    until(lambda: queued(shop) == [])


class TestScopes:
    """What may be sent beside a waiting message, and beside a running one."""

    @pytest.mark.parametrize(
        ("scope", "beside_running"),
        [
            ("until_executing", True),
            ("until_executed", False),
            ("until_and_while_executing", True),
            ("until_expired", False),
        ],
    )
    def test_one_message_waits(self, shop: Shop, tasks: SimpleNamespace, scope: str, beside_running: bool) -> None:
        job = tasks.scopes[scope]
        waiting = [job.delay("report", LONG) for _ in range(10)]
        assert [is_sent(result) for result in waiting] == [True, *[False] * 9]
        start(shop, concurrency=1)
        shop.record.wait_for(starts=1)
        running = [job.delay("report", LONG) for _ in range(10)]
        assert sum(map(is_sent, running)) == beside_running
        shop.record.let_end("report")
        assert {result.get(timeout=LIMIT) for result in waiting + running} == {"report"}
        assert len(shop.record.runs("report")) == 1 + beside_running
        if scope == "until_and_while_executing":
            assert overlaps(shop.record.runs("report")) == []
        if scope != "until_expired":
            until_can_be_sent(shop)
            assert is_sent(job.delay("report"))

    @pytest.mark.parametrize("scope", quick_first("until_executed", "until_executing", "until_and_while_executing"))
    def test_many_senders_at_once(self, shop: Shop, tasks: SimpleNamespace, scope: str) -> None:
        """Without workers, one message of each job is sent; with workers, as many as run."""
        job, jobs = tasks.scopes[scope], [f"job {number}" for number in range(10)]

        def send(seed: int) -> int:
            chance = random.Random(seed)
            return sum(is_sent(job.delay(chance.choice(jobs), 0.0)) for _ in range(100))

        with ThreadPoolExecutor(8) as senders:
            assert sum(senders.map(send, range(8))) == len(jobs)
            start(shop, "one", "two")
            sent = len(jobs) + sum(senders.map(send, range(8)))
        shop.record.wait_for(ends=sent)
        until_can_be_sent(shop)
        assert len(shop.record.runs()) == sent
        if scope != "until_executing":
            assert overlaps(shop.record.runs()) == []

    def test_task_that_sends_itself_again(self, shop: Shop, tasks: SimpleNamespace) -> None:
        start(shop)
        tasks.sends_itself.delay("report", 3)
        shop.record.wait_for(ends=4)
        assert len(shop.record.runs("report")) == 4


class TestMessageIsOver:
    """Its lock is free, whatever ends the message."""

    @pytest.mark.parametrize("name", ["rejected", "dies", "dies_rejected", "too_long", "not_begun"])
    def test_without_success(self, shop: Shop, tasks: SimpleNamespace, name: str) -> None:
        start(shop)
        result = tasks.__dict__[name].delay("report")
        until(lambda: result.state == states.FAILURE)
        until_can_be_sent(shop)

    def test_revoked_as_it_comes(self, shop: Shop, tasks: SimpleNamespace) -> None:
        (worker,) = start(shop)
        blocking = tasks.while_executing.delay("other", LONG)
        shop.record.wait_for(starts=1)
        result = tasks.until_executed.apply_async(("report",), countdown=4)
        until(lambda: f"{result.id}] received" in worker.log)
        shop.app.control.revoke(result.id)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=LIMIT)
        until_can_be_sent(shop)
        shop.record.let_end("other")
        blocking.get(timeout=LIMIT)

    def test_terminated(self, shop: Shop, tasks: SimpleNamespace) -> None:
        start(shop)
        result = tasks.until_executed.delay("report", LONG)
        shop.record.wait_for(starts=1)
        shop.app.control.revoke(result.id, terminate=True)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=LIMIT)
        until_can_be_sent(shop)

    def test_task_that_no_worker_knows(self, shop: Shop) -> None:
        @shop.app.task(base=SingletonTask, name="queued.unknown", shared=False, lock_scope="until_executed")
        def unknown() -> None: ...

        (worker,) = start(shop)
        unknown.delay()
        until(lambda: "unregistered task" in worker.log)
        until_can_be_sent(shop)

    def test_worker_is_killed(self, shop: Shop, tasks: SimpleNamespace) -> None:
        """The message was acknowledged and, as usual with Celery, is lost: the lock ends with its process."""
        (worker,) = start(shop)
        tasks.until_executed.delay("report", LONG)
        shop.record.wait_for(starts=1)
        until(lambda: shorter(shop))
        worker.kill()
        until_can_be_sent(shop)
        start(shop, "two")
        result = tasks.until_executed.delay("report")
        assert is_sent(result)
        assert result.get(timeout=LIMIT) == "report"


def shorter(shop: Shop, seconds: float = TTL) -> bool:
    """Whether the lock of the message lasts no longer than a lease."""
    with shop.locks() as client:
        return all(client.ttl(key) <= seconds for key in queued(shop))


class TestMessageGoesOn:
    """Its lock stays held."""

    def test_until_its_message_comes_again(self, shop: Shop, tasks: SimpleNamespace) -> None:
        start(shop)
        first = tasks.late.delay("report", LONG)
        (run,) = shop.record.wait_for(starts=1)
        os.kill(run.pid, signal.SIGKILL)
        shop.record.wait_for(starts=2)
        assert not is_sent(tasks.late.delay("report"))
        shop.record.let_end("report")
        assert first.get(timeout=LIMIT) == "report"
        until_can_be_sent(shop)
