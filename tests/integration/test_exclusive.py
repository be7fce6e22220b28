"""The main purpose, on real workers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from celery.exceptions import TaskRevokedError

from celery_singleton_lock import clock
from tests.integration.conftest import LONG, POOLS, Shop
from tests.patience import LIMIT
from tests.recording import overlaps
from tests.redis_server import RedisServer

#: Seconds of the leases in these tests.
TTL = 4.0

#: Calls a task eagerly, several times, prints its results, and waits until the main thread is the only one.
EAGER = """
import sys, threading
from celery import Celery
from celery_singleton_lock import SingletonTask
app = Celery("eager", singleton_lock_backend=sys.argv[1])
@app.task(base=SingletonTask, name="eager.report")
def report():
    return "report"
for _ in range(20):
    print(report.apply().get())
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
"""


@pytest.mark.parametrize("pool", POOLS)
def test_fifty_copies_at_once_run_one_at_a_time(shop: Shop, pool: str) -> None:
    shop.start("one", "two", pool=pool)
    results = [shop.send("waiting", "report") for _ in range(50)]
    assert [result.get(timeout=LIMIT) for result in results] == ["report"] * 50
    runs = shop.record.runs("report")
    assert len(runs) == 50
    assert overlaps(runs) == []
    assert [run.fence for run in runs] == sorted({run.fence for run in runs})


@pytest.mark.parametrize("pool", POOLS)
def test_skipped_copies_never_run(shop: Shop, pool: str) -> None:
    shop.start("one", "two", pool=pool)
    running = shop.send("exclusive", "report", LONG)
    shop.record.wait_for(starts=1)
    # A solo worker takes nothing while it runs a task; the other worker takes these copies.
    copies = [shop.send("exclusive", "report") for _ in range(8)]
    for copy in copies:
        with pytest.raises(TaskRevokedError, match=running.id):
            copy.get(timeout=LIMIT)
        assert copy.state == "REVOKED"
    shop.record.let_end("report")
    assert running.get(timeout=LIMIT) == "report"
    assert len(shop.record.runs("report")) == 1


@pytest.mark.parametrize("pool", [pool for pool in POOLS if "solo" not in str(pool)])
def test_different_arguments_run_in_parallel(shop: Shop, pool: str) -> None:
    shop.start("one", pool=pool, concurrency=4)
    results = [shop.send("exclusive", f"tenant-{n}", 1.0) for n in range(4)]
    for result in results:
        result.get(timeout=LIMIT)
    runs = shop.record.runs()
    assert max(run.start for run in runs) < min(run.end for run in runs)


def test_plain_copies_do_overlap(shop: Shop) -> None:
    """This shows that the checker can fail."""
    shop.start("one", "two")
    for result in [shop.send("plain", "report", 0.5) for _ in range(4)]:
        result.get(timeout=LIMIT)
    assert overlaps(shop.record.runs("report"))


@pytest.mark.parametrize("pool", POOLS)
def test_task_longer_than_its_ttl_keeps_its_lock(shop: Shop, pool: str) -> None:
    shop.start("one", "two", pool=pool)
    long = shop.send("waiting", "report", 2.5 * TTL)
    shop.record.wait_for(starts=1)
    second = shop.send("waiting", "report")
    assert long.get(timeout=LIMIT) == "report"
    assert second.get(timeout=LIMIT) == "report"
    first_run, second_run = shop.record.runs("report")
    assert overlaps([first_run, second_run]) == []
    assert second_run.start - first_run.end < TTL * 0.6, "woken by the release, not by the end of the lease"


def test_waiter_gets_the_lock_of_a_killed_worker_within_ttl_and_a_second(shop: Shop) -> None:
    victim, heir = shop.start("one", "two")
    shop.send("exclusive", "report", 60.0)
    (run,) = shop.record.wait_for(starts=1)
    if os.getpgid(run.pid) != victim.process.pid:
        victim, heir = heir, victim
    # Both workers take from their queue: the victim's free slot may take one, which is then lost with the victim.
    waiters = [shop.send("waiting", "report", acks_late=True) for _ in range(4)]
    assert waiters
    killed_at = clock.now()
    victim.kill()
    runs = shop.record.wait_for(starts=2, job="report")
    dead, next_run = shop.record.runs("report", killed_at=killed_at)[:2]
    assert overlaps([dead, next_run]) == []
    assert killed_at < next_run.start <= killed_at + TTL + 1.0
    assert runs


def test_threads_of_eager_calls_end(redis_server: RedisServer) -> None:
    # In a process of its own: the thread of another test's lease may be at work here.
    done = subprocess.run(
        [sys.executable, "-c", EAGER, redis_server.url], capture_output=True, text=True, check=True, timeout=LIMIT
    )
    assert done.stdout == 20 * "report\n"
