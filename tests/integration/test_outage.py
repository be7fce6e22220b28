"""What the log says about an outage of the lock server: that of a worker, and of a program with a `Lock`."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.integration.conftest import LONG, POOLS, Shop, quick_first, until
from tests.integration.workers import Worker
from tests.patience import LIMIT
from tests.recording import Run
from tests.redis_server import RedisServer

#: Seconds of the leases.
TTL = 6.0

_LINE = re.compile(r"\[[^]]*: (?:INFO|WARNING|ERROR)/([\w-]+)\] (.*)")

BEGINS, ENDS = "; trying again", " answers again, after an outage of "


@pytest.fixture
def split(redis_server: RedisServer, own_redis: RedisServer, shop_on: Callable[..., Shop]) -> Shop:
    """A shop with a separate lock server, which the test may break."""
    return shop_on(redis_server, locks=own_redis, singleton_lock_ttl=TTL)


def said(worker: Worker, about: str) -> list[str]:
    """The processes that logged a line with this text, once for each line."""
    return [process for process, line in _LINE.findall(worker.log) if about in line]


def is_said_once(worker: Worker) -> bool:
    """Whether each process that has said that it begins has said that it is over, and nothing else about it."""
    begins, ends = said(worker, BEGINS), said(worker, ENDS)
    assert len({*begins}) == len(begins)
    assert len({*ends}) == len(ends)
    return bool(begins) and {*begins} == {*ends}


def use_until_it_is_over(shop: Shop, worker: Worker) -> None:
    """A process notices the end as it uses the server: take locks in all of them."""
    number = iter(range(10_000))

    def is_over() -> bool:
        results = [shop.send("exclusive", f"after {next(number)}", TTL / 2) for _ in range(3)]
        assert all(result.get(timeout=LIMIT) for result in results)
        return is_said_once(worker)

    until(is_over, "each process has reported the end")


def stopped(shop: Shop, jobs: list[str]) -> list[Run]:
    """The runs of these jobs, once all of them were stopped."""
    until(lambda: all(run.outcome == "aborted" for job in jobs for run in shop.record.runs(job)), "they are stopped")
    return [run for job in jobs for run in shop.record.runs(job)]


@pytest.mark.parametrize("pool", POOLS)
def test_outage_is_reported_once_from_its_beginning_to_its_end(split: Shop, own_redis: RedisServer, pool: str) -> None:
    """By each process that has met it."""
    jobs = ["export"] if pool == "solo" else ["export", "bill", "ship"]
    (worker,) = split.start("one", pool=pool, concurrency=len(jobs))
    results = [split.send("exclusive", job, LONG) for job in jobs]
    split.record.wait_for(starts=len(jobs))
    own_redis.kill()
    stopped(split, jobs)
    until(lambda: len(said(worker, "has lost its lock")) == len(jobs), "each loss is reported")
    own_redis.start()
    assert [type(result.get(timeout=LIMIT, propagate=False)).__name__ for result in results] == ["LockLost"] * len(jobs)
    kinds = {process.partition("-")[0] for process in said(worker, "has lost its lock")}
    assert kinds == {"ForkPoolWorker" if pool == "prefork" else "MainProcess"}
    use_until_it_is_over(split, worker)
    assert (said(worker, BEGINS) == ["MainProcess"]) == (pool != "prefork")


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
        split.wait_for_renewals(1)
        assert said(worker, "OutOfMemoryError")
        assert said(worker, ENDS) == []
        server.config_set("maxmemory", 0)
    assert [result.get(timeout=LIMIT) for result in results] == [f"job-{number}" for number in range(3)]
    split.record.let_end("export")
    assert holder.get(timeout=LIMIT) == "export"
    use_until_it_is_over(split, worker)
