"""Locks that are taken when messages are sent: held while these wait, and free when they have ended in any way."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from celery import chain, states
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from celery.signals import before_task_publish

from celery_singleton_lock import DuplicateResult, SingletonTask, clock
from celery_singleton_lock.task.message import HEADER
from tests.integration.conftest import LONG, Shop, quick_first, until
from tests.integration.queued_tasks import PAUSE, define
from tests.patience import LIMIT
from tests.recording import overlaps
from tests.redis_server import RedisServer

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

    def test_by_the_exit_of_its_process(self, shop: Shop, tasks: SimpleNamespace) -> None:
        """The pool may report the child as lost, or `SystemExit`: whichever comes first."""
        start(shop)
        results = [tasks.exits.delay(f"report {number}") for number in range(6)]
        until(lambda: {result.state for result in results} == {states.FAILURE})
        until_can_be_sent(shop)

    @pytest.mark.parametrize("how", ["ignore", "reject"])
    def test_in_before_start(self, shop: Shop, tasks: SimpleNamespace, how: str) -> None:
        tasks.hooked.delay("report", how)
        assert len(queued(shop)) == 1
        start(shop)
        until_can_be_sent(shop)
        assert shop.record.runs() == []

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

    def test_terminated_greenlet(self, shop: Shop, tasks: SimpleNamespace) -> None:
        start(shop, pool="gevent")
        result = tasks.late.delay("report", LONG)
        shop.record.wait_for(starts=1)
        shop.app.control.revoke(result.id, terminate=True)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=LIMIT)
        until_can_be_sent(shop)

    def test_given_back_after_it_was_acknowledged(self, shop: Shop, tasks: SimpleNamespace) -> None:
        """Celery does not give it back in this case."""
        start(shop)
        tasks.given_back.delay("report")
        shop.record.wait_for(ends=1)
        until_can_be_sent(shop)

    def test_task_that_no_worker_knows(self, shop: Shop) -> None:
        @shop.app.task(base=SingletonTask, name="queued.unknown", shared=False, lock_scope="until_executed")
        def unknown() -> None: ...

        (worker,) = start(shop)
        unknown.delay()
        until(lambda: "unregistered task" in worker.log)
        until_can_be_sent(shop)

    def test_message_that_its_process_cannot_read(self, shop: Shop, tasks: SimpleNamespace) -> None:
        start(shop)
        tasks.until_executing.apply_async(("report",), serializer="pickle")
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

    def test_lock_ends_with_its_process_from_the_start(self, shop: Shop, tasks: SimpleNamespace) -> None:
        """Not from the first renewal of a long lease: the lock is confirmed when the task starts."""
        start(shop)
        tasks.long_lease.delay("report", LONG)
        shop.record.wait_for(starts=1)
        until(lambda: shorter(shop, 600))
        shop.record.let_end("report")


def shorter(shop: Shop, seconds: float = TTL) -> bool:
    """Whether the lock of the message lasts no longer than a lease."""
    with shop.locks() as client:
        return all(client.ttl(key) <= seconds for key in queued(shop))


class TestNewLockServer:
    """Messages wait that were sent with a lock on another server, where nobody frees it any more."""

    def test_they_run_one_at_a_time_and_a_call_is_sent_beside_them(
        self, shop: Shop, tasks: SimpleNamespace, redis_server: RedisServer, shop_on: Callable[..., Shop]
    ) -> None:
        moved = shop_on(redis_server, singleton_lock_backend=redis_server.url_of(4), singleton_lock_ttl=TTL)
        before = tasks.until_and_while_executing.delay("report", LONG)
        beside = define(moved.app).until_and_while_executing.delay("report")
        assert is_sent(beside)
        start(moved)
        moved.record.wait_for(starts=1)
        moved.record.let_end("report")
        assert [result.get(timeout=LIMIT) for result in (before, beside)] == ["report"] * 2
        runs = moved.record.runs("report")
        assert len(runs) == 2
        assert overlaps(runs) == []
        until(lambda: moved.held() == [])
        assert len(queued(shop)) == 1, "it ends by its time to live"


class TestRollback:
    """Workers of an earlier deploy, which do not have this package, have run the messages: nobody frees their locks."""

    def test_keys_are_free_once_the_messages_have_ended(self, shop: Shop, tasks: SimpleNamespace) -> None:
        jobs = [f"job-{number}" for number in range(20)]
        before = [tasks.until_executed.delay(job) for job in jobs]
        failed = tasks.fails.delay("report")
        (old,) = shop.start("old", app="tests.integration.earlier_deploy")
        assert [result.get(timeout=LIMIT) for result in before] == jobs
        with pytest.raises(ValueError, match="as told"):
            failed.get(timeout=LIMIT)
        old.terminate()
        assert len(queued(shop)) == 21
        after = [tasks.until_executed.delay(job) for job in jobs]
        part = chain(tasks.fails.si("report"), tasks.echo.s()).delay().parent
        assert all(map(is_sent, after))
        assert {result.id for result in after}.isdisjoint(result.id for result in before)
        again = [tasks.until_executed.delay(job) for job in jobs]
        assert [result.id for result in again] == [result.id for result in after], "one message waits"
        start(shop)
        assert [result.get(timeout=LIMIT) for result in after] == jobs
        with pytest.raises(ValueError, match=f"as told {part.id}"):
            part.get(timeout=LIMIT)
        until_can_be_sent(shop)


class TestMessageGoesOn:
    """Its lock stays held."""

    @pytest.mark.parametrize("how", ["retry", "retry for a cause"])
    def test_by_a_retry_in_before_start(self, shop: Shop, tasks: SimpleNamespace, how: str) -> None:
        start(shop)
        first = tasks.hooked.delay("report", how)
        shop.record.wait_for(starts=1)
        assert not is_sent(tasks.hooked.delay("report", how))
        shop.record.let_end("report")
        assert first.get(timeout=LIMIT) == "report"
        until_can_be_sent(shop)

    @pytest.mark.parametrize("done_ttl", [0, 3600])
    def test_by_a_retry_for_a_soft_time_limit(self, shop: Shop, tasks: SimpleNamespace, done_ttl: int) -> None:
        """Also where nothing is recorded that would tell."""
        shop.conf["singleton_lock_done_ttl"] = done_ttl
        start(shop)
        first = tasks.retries_when_late.delay("report")
        shop.record.wait_for(starts=2)
        assert not is_sent(tasks.retries_when_late.delay("report"))
        shop.record.let_end("report")
        assert first.get(timeout=LIMIT) == "report"
        until_can_be_sent(shop)

    @pytest.mark.parametrize(
        ("name", "state"),
        [("retrying", states.RETRY), ("replaced", states.IGNORED), ("resent", states.RETRY)],
        ids=["retried", "replaced", "returned"],
    )
    def test_while_a_copy_of_an_earlier_attempt_comes(
        self, shop: Shop, tasks: SimpleNamespace, name: str, state: str
    ) -> None:
        (worker,) = start(shop)
        noted: dict[str, Any] = {}

        def note(headers: dict[str, Any], **_: Any) -> None:
            noted.update(headers)

        task = getattr(tasks, name)
        before_task_publish.connect(note, weak=False)
        try:
            first = task.delay("report")
        finally:
            before_task_publish.disconnect(note)
        until(lambda: f"[{first.id}] (job='report') freed" in worker.log)
        ours = {HEADER: noted[HEADER]}
        shop.app.send_task(task.name, ("report",), task_id=first.id, headers=ours)
        until(lambda: f"already done ({state}" in worker.log)
        clock.sleep(PAUSE / 16)
        assert not is_sent(task.delay("report"))
        assert first.get(timeout=LIMIT) == "report"
        until_can_be_sent(shop)

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


class TestCanvas:
    """Whichever message has the lock, every part gets its end, and so do the tasks after it."""

    def test_steps_of_one_chain_with_one_key(self, shop: Shop, tasks: SimpleNamespace) -> None:
        start(shop)
        job = tasks.until_executed
        result = chain(job.si("report"), job.si("report"), job.si("report")).apply_async()
        assert result.get(timeout=LIMIT) == "report"
        assert len(shop.record.runs("report")) == 3
        until_can_be_sent(shop)
