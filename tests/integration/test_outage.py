"""What the log says about an outage of the lock server: that of a worker, and of a program with a `Lock`."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from redis import Redis

from celery_singleton_lock import Lock, clock
from celery_singleton_lock.heartbeat import MAX_SLEEP
from celery_singleton_lock.lock import NotOwned
from tests.integration.conftest import LONG, POOLS, Shop, quick_first, until
from tests.integration.outside import NAME, RENEWED
from tests.integration.test_renewal import in_child, status_of
from tests.integration.workers import Worker
from tests.patience import LIMIT
from tests.recording import Run
from tests.redis_server import RedisServer

#: Seconds of the leases: no half-time comes before the test looks, even on a busy machine.
TTL = 6.0

_WARNING = re.compile(r"\[[^]]*: (?:WARNING|ERROR)/(\w+)(?:-\d+)?\] (.*)")


@pytest.fixture
def split(redis_server: RedisServer, own_redis: RedisServer, shop_on: Callable[..., Shop]) -> Shop:
    """A shop with a separate lock server, which the test may break."""
    return shop_on(redis_server, locks=own_redis, singleton_lock_ttl=TTL)


def said(worker: Worker, about: str) -> list[tuple[str, str]]:
    """The warnings and errors that contain a text, each with the kind of process that logged it."""
    return [(process, line) for process, line in _WARNING.findall(worker.log) if about in line]


def seconds(line: str) -> float:
    found = re.search(r"after an outage of ([\d.]+) s", line)
    assert found is not None
    return float(found[1])


def stopped(shop: Shop, jobs: list[str]) -> list[Run]:
    """The runs of these jobs, once all of them were stopped."""
    until(lambda: all(run.outcome == "aborted" for job in jobs for run in shop.record.runs(job)), "they are stopped")
    return [run for job in jobs for run in shop.record.runs(job)]


@pytest.mark.parametrize("pool", POOLS)
def test_outage_is_reported_once_from_its_beginning_to_its_end(split: Shop, own_redis: RedisServer, pool: str) -> None:
    """Also if all leases were lost, and nobody needs the server when it answers again."""
    jobs = ["export"] if pool == "solo" else ["export", "bill", "ship"]
    (worker,) = split.start("one", pool=pool, concurrency=len(jobs))
    results = [split.send("exclusive", job, LONG) for job in jobs]
    split.record.wait_for(starts=len(jobs))
    until(lambda: worker.log.count("holds singleton_lock") == len(jobs))
    if pool != "solo":  # Which answers nobody while it runs a task.
        inspect = split.app.control.inspect(timeout=LIMIT, limit=1)
        until(lambda: len(inspect.locks()[worker.name]) == len(jobs), "the main process knows the runs")
    clock.sleep(2 * MAX_SLEEP)  # The main process hears of each lease within `MAX_SLEEP`; nothing reports that.
    own_redis.kill()
    began = clock.now()
    stopped(split, jobs)
    until(lambda: len(said(worker, "has lost its lock")) == len(jobs), "each loss is reported")
    own_redis.start()
    until(lambda: said(worker, "answers again"), "the end is reported")
    lasted = clock.now() - began
    (begins, half), (ends,) = said(worker, "; trying again; "), said(worker, "answers again")
    assert begins[0] == ends[0] == "MainProcess"
    assert ("1 lease is given up" if len(jobs) == 1 else "3 leases are given up") in begins[1]
    assert re.search(r" in \d\.\d s.*: task [\w.]+\[[\w-]+\] \(job='\w+'\), singleton_lock:", begins[1])
    assert "s now; trying again; " in half[1]
    assert 2 * TTL / 3 - TTL / 3 - 1 < seconds(ends[1]) < lasted
    kinds = {process for process, _ in said(worker, "has lost its lock")}
    assert kinds == {"ForkPoolWorker" if pool == "prefork" else "MainProcess"}
    assert [type(result.get(timeout=LIMIT, propagate=False)).__name__ for result in results] == ["LockLost"] * len(jobs)
    assert len(said(worker, "127.0.0.1")) == 3 + len(jobs), "nothing else is said about it"


@pytest.mark.parametrize("pool", quick_first("prefork", "threads"))
def test_outage_without_leases_is_reported_once(split: Shop, own_redis: RedisServer, pool: str) -> None:
    """Whichever process of the pool asks for a lock."""
    (worker,) = split.start("one", pool=pool, concurrency=3)
    own_redis.kill()
    results = [split.send("exclusive", f"job-{number}") for number in range(6)]
    until(lambda: worker.log.count("put back, due in") >= 6)
    until(lambda: said(worker, "trying again"), "the beginning is reported")
    own_redis.start()
    assert [result.get(timeout=LIMIT) for result in results] == [f"job-{number}" for number in range(6)]
    until(lambda: said(worker, "answers again"), "the end is reported")
    assert [process for process, _ in said(worker, "127.0.0.1")] == ["MainProcess"] * 2


@pytest.mark.parametrize("pool", quick_first("prefork", "threads"))
def test_refusal_is_an_outage_until_locks_are_granted(split: Shop, own_redis: RedisServer, pool: str) -> None:
    """A server without memory answers, and renews the lease of a task that runs."""
    (worker,) = split.start("one", pool=pool, concurrency=3)
    holder = split.send("exclusive", "export", LONG)
    split.record.wait_for(starts=1)
    with own_redis.client(2) as server:
        server.config_set("maxmemory", 1)
        results = [split.send("exclusive", f"job-{number}") for number in range(3)]
        until(lambda: worker.log.count("put back, due in") >= 6)
        renewed = server.pttl(split.held()[0])
        until(lambda: server.pttl(split.held()[0]) > renewed, "the lease was renewed")
        (process, begins), *half = said(worker, "127.0.0.1")
        assert all("s now; trying again" in line for _, line in half)
        server.config_set("maxmemory", 0)
    assert process == "MainProcess"
    assert "OutOfMemoryError" in begins
    assert [result.get(timeout=LIMIT) for result in results] == [f"job-{number}" for number in range(3)]
    until(lambda: said(worker, "answers again"), "the end is reported")
    split.record.let_end("export")
    assert holder.get(timeout=LIMIT) == "export"
    assert len(said(worker, "127.0.0.1")) <= 3, "there may be a line at half time"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture, own_redis: RedisServer) -> Callable[[str], int]:
    """How many warnings about the test's server have a text: stores of earlier tests may log as well."""

    def count(text: str) -> int:
        said = [it.getMessage() for it in caplog.records if it.levelname == "WARNING"]
        return sum(f":{own_redis.port}" in line and text in line for line in said)

    return count


@pytest.mark.parametrize("is_child", [False, True])
def test_each_outage_is_reported_by_each_program(
    own_redis: RedisServer, lines: Callable[[str], int], is_child: bool
) -> None:
    """A process that was forked from one without a pool has nobody who does it for it."""
    client = Redis(port=own_redis.port)
    server = client.info("server")["process_id"]
    lock = Lock(client, NAME, timeout=RENEWED)
    with lock:
        before = {*threading.enumerate()}

    def outages() -> bool:
        for number in (1, 2):
            assert lock.acquire()
            os.kill(server, signal.SIGSTOP)
            until(lambda: lines("trying again; 1 lease is given up") >= number)  # noqa: B023 - called at once
            until(lambda: lock.lost)
            os.kill(server, signal.SIGCONT)
            until(lambda: lines("answers again") == number)  # noqa: B023
            with suppress(NotOwned):
                lock.release()
        until(lambda: {*threading.enumerate()} <= before, "its threads end")
        return lines("") <= 3 * number

    assert status_of(in_child(outages)) == 0 if is_child else outages()
