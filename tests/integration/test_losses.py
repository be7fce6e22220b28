"""Children, workers and hosts that are killed or stopped while they hold a lock."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from billiard.exceptions import WorkerLostError
from redis import Redis

from celery_singleton_lock import LockLost, clock
from tests.integration.conftest import LONG, POOLS, Shop, kill_child, until
from tests.integration.workers import Worker
from tests.patience import LIMIT
from tests.recording import overlaps
from tests.redis_server import RedisServer

#: Seconds of the leases in the tests that wait for one to end. Some are renewed by the main process alone.
TTL = 4.0


def pidfds(worker: Worker) -> list[str]:
    """The processes whose end a worker would notice at once."""
    found = []
    for descriptor in Path(f"/proc/{worker.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(descriptor))
    return [name for name in found if "pidfd" in name]


@pytest.fixture
def patient(redis_server: RedisServer, shop_on: Callable[..., Shop]) -> Shop:
    """A shop whose leases are longer than any test waits: a lock is free only if it was freed."""
    return shop_on(redis_server, singleton_lock_ttl=600.0)


class TestChildIsKilled:
    """As by the OOM killer. The main process frees the lock."""

    def test_waiting_copy_starts_at_once(self, patient: Shop) -> None:
        patient.start("one", "two")
        victim = patient.send("exclusive", "report", 300.0)
        (run,) = patient.record.wait_for(starts=1)
        waiter = patient.send("waiting", "report")
        until(lambda: "waiting" in " ".join(patient.keys()))
        killed_at = kill_child(run)
        assert waiter.get(timeout=LIMIT) == "report"
        dead, following = patient.record.runs("report", killed_at=killed_at)
        assert overlaps([dead, following]) == []
        assert following.start - killed_at < 60, "long before the end of the lease"
        with pytest.raises(WorkerLostError):
            victim.get(timeout=LIMIT)

    def test_rejected_message_is_not_refused_by_its_own_lock(self, patient: Shop) -> None:
        patient.start("one", "two")
        result = patient.send("rejected_when_lost", "report", 300.0)
        (run,) = patient.record.wait_for(starts=1)
        killed_at = kill_child(run)
        assert result.get(timeout=LIMIT) == "report"
        dead, following = patient.record.runs("report", killed_at=killed_at)
        assert following.task_id == dead.task_id
        assert overlaps([dead, following]) == []
        assert not any("a copy waits, in case it dies" in worker.log for worker in patient.workers)

    def test_copy_of_a_message_that_counts_as_failed_is_not_run(self, patient: Shop) -> None:
        """Without reject_on_worker_lost, Celery's rule is that a killed task has failed and is not run again."""
        patient.start("one", "two")
        result = patient.send("late", "report", 300.0)
        (run,) = patient.record.wait_for(starts=1)
        kill_child(run)
        with pytest.raises(WorkerLostError):
            result.get(timeout=LIMIT)
        until(lambda: ":done:" in " ".join(patient.keys()))
        patient.send("late", "report", 0.0, task_id=result.id)
        until(lambda: any("this copy is dropped" in worker.log for worker in patient.workers))
        assert len(patient.record.runs("report")) == 1
        assert patient.state_of(result) == "FAILURE"

    def test_many_children_at_once(self, patient: Shop) -> None:
        (worker,) = patient.start("one", concurrency=4)
        for n in range(4):
            patient.send("exclusive", f"job-{n}", 300.0)
        runs = patient.record.wait_for(starts=4)
        assert len({run.pid for run in runs}) == 4
        for run in runs:
            kill_child(run)
        until(lambda: not patient.held())
        again = [patient.send("exclusive", f"job-{n}") for n in range(4)]
        for n, result in enumerate(again):
            assert result.get(timeout=LIMIT) == f"job-{n}"
        assert worker.process.poll() is None
        # It watches the children that have had something to do.
        until(lambda: len(pidfds(worker)) <= 4, "those that are gone left no descriptor")

    def test_where_nobody_can_watch_processes(self, shop: Shop) -> None:
        """The main process renews, and frees the lock once Celery has noticed."""
        shop.conf["test_without_pidfds"] = True
        shop.start("one")
        shop.send("exclusive", "report", LONG)
        (run,) = shop.record.wait_for(starts=1)
        os.kill(run.pid, signal.SIGSTOP)
        shop.wait_for_renewals(1)
        kill_child(run)
        assert shop.send("waiting", "report").get(timeout=LIMIT) == "report"


class TestWorkerIsKilled:
    @pytest.mark.parametrize("pool", POOLS)
    def test_another_worker_of_the_host_frees_its_locks(self, patient: Shop, pool: str) -> None:
        """The process has provably ended, so that nobody has to wait for the end of its lease."""
        (victim,) = patient.start("victim", pool=pool)
        killed = patient.send("exclusive", "report", 300.0)
        (run,) = patient.record.wait_for(starts=1)
        killed_at = clock.now()
        victim.kill()
        (heir,) = patient.start("heir", pool=pool)
        assert patient.send("exclusive", "report").get(timeout=LIMIT) == "report"
        assert f"(job='report') was held by task {killed.id} on victim@test (pid {run.pid})" in heir.log
        assert overlaps(patient.record.runs("report", killed_at=killed_at)) == []

    def test_worker_of_the_same_name_frees_the_locks_of_the_dead_one(self, patient: Shop) -> None:
        (victim,) = patient.start("name", concurrency=3)
        for n in range(3):
            patient.send("exclusive", f"job-{n}", 300.0)
        patient.record.wait_for(starts=3)
        victim.kill()
        assert len(patient.held()) == 3
        patient.start("name")
        until(lambda: not patient.held())

    def test_lock_of_a_host_that_is_gone_is_free_after_its_lease(self, shop: Shop) -> None:
        """Seen from another host, nothing can be proven: the lease has to end."""
        (victim,) = shop.start("victim")
        shop.send("exclusive", "report", 300.0)
        (run,) = shop.record.wait_for(starts=1)
        clock.sleep(TTL * 0.6)
        killed_at = clock.now()
        victim.kill()
        pretend_another_host(shop)
        shop.start("heir")
        assert shop.send("waiting", "report").get(timeout=LIMIT) == "report"
        dead, following = shop.record.runs("report", killed_at=killed_at)
        assert overlaps([dead, following]) == []
        assert following.fence > run.fence


class TestChildDoesNotRun:
    """Its heartbeat stands still; the main process renews the lease instead."""

    def test_stopped_child_keeps_the_lock_and_goes_on(self, shop: Shop) -> None:
        shop.start("one", "two")
        result = shop.send("exclusive", "report", 300.0)
        (run,) = shop.record.wait_for(starts=1)
        waiter = shop.send("waiting", "report", 0.05)
        os.kill(run.pid, signal.SIGSTOP)
        clock.sleep(2.5 * TTL)
        assert len(shop.record.runs("report")) == 1
        shop.record.let_end("report")
        os.kill(run.pid, signal.SIGCONT)
        assert result.get(timeout=LIMIT) == "report"
        assert waiter.get(timeout=LIMIT) == "report"
        first, second = shop.record.runs("report")
        assert first.outcome == "done"
        assert overlaps([first, second]) == []
        assert shop.record.runs("lost") == []


class TestWorkerIsStopped:
    @pytest.mark.parametrize("pool", POOLS)
    def test_stale_run_is_aborted_as_it_wakes(self, shop: Shop, pool: str) -> None:
        (stale_worker,) = shop.start("one", pool=pool, concurrency=1)
        result = shop.send("exclusive", "report", 300.0)
        (stale,) = shop.record.wait_for(starts=1)
        stale_worker.pause()
        (key,) = shop.held()
        looked_at = clock.now()
        with shop.locks() as client:
            left = client.pttl(key) / 1000
        assert left > 0
        until(lambda: not asks_for_messages(shop))
        shop.start("two", pool=pool, concurrency=1)
        following = shop.send("waiting", "report", 3.0)
        (_, second) = shop.record.wait_for(starts=2, job="report")
        assert second.start > looked_at + left, "not before the lease has ended"
        assert second.fence > stale.fence
        stale_worker.resume()
        woken_at = clock.now()
        with pytest.raises(LockLost):
            result.get(timeout=LIMIT)
        assert following.get(timeout=LIMIT) == "report"
        aborted, done = shop.record.runs("report")
        assert (aborted.outcome, done.outcome) == ("aborted", "done")
        assert aborted.end - woken_at < 60
        (lost,) = shop.record.wait_for(starts=1, job="lost")  # Its thread may be slower than the result.
        assert lost.task_id == stale.task_id


def asks_for_messages(shop: Shop) -> bool:
    """Whether a worker's request is open at the broker: if it is stopped then, it may still get the next message."""
    with Redis.from_url(shop.conf["broker_url"]) as broker:
        return any(client["cmd"] == "brpop" and "b" in client["flags"] for client in broker.client_list())


def pretend_another_host(shop: Shop) -> None:
    """Rewrite the locks so that their holders seem to run elsewhere."""
    with shop.locks() as client:
        for key in client.scan_iter("*:run"):
            value = client.get(key)
            fields = json.loads(value[32:])
            fields[-1] = "elsewhere/1/1"
            client.set(key, value[:32] + json.dumps(fields).encode(), xx=True, keepttl=True)
