"""Processes of a pool that are not forked from their main process: it does the same for them."""

from __future__ import annotations

from collections.abc import Callable

import celery
import pytest

from celery_singleton_lock import LockLost
from celery_singleton_lock.errors import InvalidOption
from tests.integration.conftest import LONG, Shop, kill_child, quick_first, until
from tests.integration.events import watching
from tests.integration.workers import Worker
from tests.patience import LIMIT
from tests.recording import overlaps
from tests.redis_server import RedisServer

pytestmark = pytest.mark.skipif(celery.VERSION[:2] < (5, 7), reason="Celery has worker_pool_start_method since 5.7")

#: Seconds of leases that are to be renewed.
TTL = 4.0

#: Celery's setting; billiard's default, as on macOS; and a server that forks.
METHODS = quick_first("setting", "spawn", "forkserver")


@pytest.fixture
def patient(redis_server: RedisServer, shop_on: Callable[..., Shop]) -> Shop:
    """A shop whose leases are longer than any test waits: a lock is free only if it was freed."""
    return shop_on(redis_server, singleton_lock_ttl=600.0)


def start(shop: Shop, method: str, **options: object) -> Worker:
    if method == "setting":
        shop.conf["worker_pool_start_method"] = "spawn"
        (worker,) = shop.start("one", **options)
    else:
        shop.conf["test_start_method"] = method
        (worker,) = shop.start("one", app="tests.integration.started_afresh_app", **options)
    return worker


@pytest.mark.parametrize("method", METHODS)
def test_c_code_that_holds_the_gil_keeps_the_lock(shop: Shop, method: str) -> None:
    start(shop, method)
    result = shop.send("holding_gil", "report", int(2 * TTL))
    shop.record.wait_for(starts=1)
    waiter = shop.send("waiting", "report")
    assert result.get(timeout=LIMIT) == "report"
    assert waiter.get(timeout=LIMIT) == "report"
    assert overlaps(shop.record.runs("report")) == []
    assert shop.record.runs("lost") == []


@pytest.mark.parametrize("method", METHODS)
def test_lock_of_a_killed_child_is_freed(patient: Shop, method: str) -> None:
    """Also of the child in its place."""
    worker = start(patient, method, concurrency=1)
    for number in range(2):
        patient.send("exclusive", f"job-{number}", LONG)
        (run,) = patient.record.wait_for(starts=1, job=f"job-{number}")
        kill_child(run)
        until(lambda: not patient.held())
    until(lambda: worker.log.count("freed for a process that ended without freeing it") == 2)


@pytest.mark.parametrize("method", METHODS)
def test_operator_sees_and_releases_the_lock(patient: Shop, method: str) -> None:
    """The child notices at once; its own next renewal is due after the end of this test."""
    start(patient, method)
    result = patient.send("exclusive", "report", LONG)
    (run,) = patient.record.wait_for(starts=1)
    inspect = patient.app.control.inspect(["one@test"], timeout=LIMIT, limit=1)
    until(lambda: inspect.locks()["one@test"])
    ((told,),) = inspect.locks().values()
    assert (told["task_id"], told["pid"]) == (result.id, run.pid)
    patient.app.control.release_lock(told["key"], reply=True, timeout=LIMIT, limit=1)
    with pytest.raises(LockLost):
        result.get(timeout=LIMIT)


@pytest.mark.parametrize("method", METHODS)
def test_child_is_told_what_the_command_line_says(shop: Shop, redis_server: RedisServer, method: str) -> None:
    """And its log has our words, and its conflicts are events for those who listen."""
    arguments = ("--singleton-lock-ttl", "77", "-E")
    worker = start(shop, method, arguments=arguments)
    shop.send("exclusive", "report", LONG)
    shop.record.wait_for(starts=1)
    with shop.locks() as client:
        (key,) = shop.held()
        assert client.pttl(key) > TTL * 1000
    kinds: list[str] = []
    with watching(shop, lambda event: kinds.append(event["type"])):
        shop.send("patient", "report")
        until(lambda: "put back" in worker.log)
        until(lambda: "lock-conflict" in kinds)


def test_process_of_a_foreign_pool_runs_no_exclusive_task(shop: Shop) -> None:
    """Nobody would renew or free for it."""
    shop.conf["worker_pool"] = "tests.integration.own_pool:TaskPool"
    shop.start("one")
    results = [shop.send("exclusive", "report") for _ in range(2)]
    for result in results:
        with pytest.raises(InvalidOption, match="allowed pools: -P prefork, threads"):
            result.get(timeout=LIMIT)
    assert shop.send("plain", "report").get(timeout=LIMIT) == "report"
    assert shop.record.runs("report") == shop.record.runs("report")[-1:]
    assert shop.held() == []
