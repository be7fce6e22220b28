"""Every way in which an execution can end or be ended: the lock is free, and every result gets a final state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded

from tests.integration.conftest import Shop, is_alive, until
from tests.integration.standing import Staff
from tests.patience import LIMIT
from tests.recording import overlaps


@pytest.fixture
def shop(staff: Staff) -> Iterator[Shop]:
    """A shop whose leases are longer than any test waits: a lock is free only if it was freed."""
    with staff.shop(singleton_lock_ttl=600.0) as shop:
        yield shop


def assert_free_and_runs(shop: Shop, job: str = "report") -> None:
    until(lambda: not shop.held())
    assert shop.send("exclusive", job).get(timeout=LIMIT) == job
    assert overlaps(shop.record.runs(job)) == []


class TestFromOutside:
    @pytest.mark.parametrize(
        ("task", "pool"),
        [
            ("limited_softly", "prefork"),
            ("limited_hard", "prefork"),
            pytest.param("limited_hard", "gevent", marks=pytest.mark.slow),
        ],
    )
    def test_time_limit(self, shop: Shop, task: str, pool: str) -> None:
        shop.start("one", "two", pool=pool)
        result = shop.send(task, "report", 30.0)
        with pytest.raises((SoftTimeLimitExceeded, TimeLimitExceeded)):
            result.get(timeout=LIMIT)
        assert_free_and_runs(shop)

    def test_hard_time_limit_that_kills_a_task_which_does_not_stop(self, shop: Shop) -> None:
        """No `finally` runs: the main process frees the lock when the child is gone, and not before."""
        shop.start("one", "two")
        result = shop.send("stubborn", "report", 30.0, time_limit=2)
        shop.record.wait_for(starts=1)
        waiting = shop.send("waiting", "report")
        with pytest.raises(TimeLimitExceeded):
            result.get(timeout=LIMIT)
        assert waiting.get(timeout=LIMIT) == "report"
        killed, following = shop.record.runs("report", killed_at=float("inf"))
        assert not is_alive(killed.pid)
        assert following.start - killed.start < 10

    @pytest.mark.parametrize("signal", ["TERM", "KILL"])
    def test_revoked_while_running(self, shop: Shop, signal: str) -> None:
        shop.start("one", "two")
        result = shop.send("exclusive", "report", 300.0)
        shop.record.wait_for(starts=1)
        shop.app.control.revoke(result.id, terminate=True, signal=signal)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=LIMIT)
        until(lambda: not shop.held())
        assert shop.send("exclusive", "report").get(timeout=LIMIT) == "report"
        assert len(shop.record.runs("report")) == 2

    def test_revoked_before_it_started(self, shop: Shop) -> None:
        shop.start("one", "two")
        result = shop.send("exclusive", "report", countdown=3)
        until(lambda: any(result.id in worker.log for worker in shop.workers))
        shop.app.control.revoke(result.id)
        with pytest.raises(TaskRevokedError):
            result.get(timeout=LIMIT)
        assert shop.held() == []
        assert shop.record.runs("report") == []
        assert_free_and_runs(shop)


class TestByItself:
    @pytest.fixture(autouse=True)
    def _workers(self, shop: Shop) -> None:
        shop.start("one", "two")

    def test_reject_and_requeue_runs_it_again(self, shop: Shop) -> None:
        result = shop.send("ending", "report", "requeue")
        assert result.get(timeout=LIMIT) == "report"
        runs = shop.record.runs("report")
        assert len(runs) == 2
        assert overlaps(runs) == []
        assert_free_and_runs(shop)

    def test_exit(self, shop: Shop) -> None:
        """The process ends in the middle of the task, without a `finally`."""
        result = shop.send("ending", "report", "exit")
        with pytest.raises(Exception, match=r"exited prematurely"):
            result.get(timeout=LIMIT)
        until(lambda: not shop.held())
        assert shop.send("exclusive", "report").get(timeout=LIMIT) == "report"

    def test_replaced_by_itself(self, shop: Shop) -> None:
        """Both have the same id and the same lock, which the first may still hold when the second arrives."""
        results = [shop.send("ending", f"job-{n}", "replace by itself") for n in range(20)]
        for n, result in enumerate(results):
            assert result.get(timeout=LIMIT) == f"job-{n}"
        runs = shop.record.runs()
        assert len(runs) == 40
        assert overlaps(runs) == []

    def test_applies_itself(self, shop: Shop) -> None:
        """It would have to wait for its own caller."""
        for how in ("apply itself", "apply itself, waiting"):
            result = shop.send("ending", "report", how)
            assert result.get(timeout=LIMIT) == "IGNORED"
        assert_free_and_runs(shop)


class TestRetry:
    @pytest.fixture(autouse=True)
    def _workers(self, shop: Shop) -> None:
        shop.start("one", "two")

    def test_all_attempts_run_and_others_may_run_in_between(self, shop: Shop) -> None:
        result = shop.send("retaining", "report", 2.0, singleton_lock={"retain_on_retry": False})
        shop.record.wait_for(ends=1)
        assert shop.send("exclusive", "report").get(timeout=LIMIT) == "report"
        assert result.state in ("RETRY", "PENDING")
        assert result.get(timeout=LIMIT) == "report"
        runs = shop.record.runs("report")
        assert len(runs) == 4
        assert overlaps(runs) == []

    def test_retained_lock_lets_no_other_in_between(self, shop: Shop) -> None:
        result = shop.send("retaining", "report", 2.0)
        shop.record.wait_for(ends=1)
        with pytest.raises(TaskRevokedError, match=result.id):
            shop.send("exclusive", "report").get(timeout=LIMIT)
        waiting = shop.send("waiting", "report")
        assert result.get(timeout=LIMIT) == "report"
        assert waiting.get(timeout=LIMIT) == "report"
        runs = shop.record.runs("report")
        assert [run.task_id for run in runs] == [result.id] * 3 + [waiting.id]
        assert overlaps(runs) == []
        assert [run.fence for run in runs] == sorted({run.fence for run in runs})
        assert_free_and_runs(shop)
