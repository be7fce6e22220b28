"""Workers that stop, shrink, or replace their processes: no lock is left, and no task is cut short."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

import celery
import pytest

from tests.integration.conftest import LONG, POOLS, Shop, is_alive, until
from tests.integration.workers import Worker
from tests.patience import LIMIT
from tests.recording import overlaps
from tests.redis_server import RedisServer


@pytest.fixture
def shop(redis_server: RedisServer, shop_on: Callable[..., Shop]) -> Shop:
    """A shop whose leases are longer than any test waits: a lock is free only if it was freed."""
    return shop_on(redis_server, singleton_lock_ttl=600.0, worker_pool_restarts=True)


def quit_at_work(shop: Shop, worker: Worker, signals: Sequence[int] = (signal.SIGQUIT,)) -> None:
    """Shut down coldly a worker that lists its task as active.

    Celery (seen in 5.7, without this package) waits for a child forever if the signal comes while it reads from that
    child that a task has begun. Once it lists the task, it has read that.
    """
    begin_to_quit(shop, worker, signals)
    worker.process.wait(LIMIT)


def begin_to_quit(shop: Shop, worker: Worker, signals: Sequence[int] = (signal.SIGQUIT,)) -> None:
    inspect = shop.app.control.inspect(destination=[worker.name], timeout=1.0, limit=1)
    until(lambda: (inspect.active() or {}).get(worker.name))
    for number in signals[:-1]:
        worker.process.send_signal(number)
        until(lambda: "Warm shutdown" in worker.log)
    worker.process.send_signal(signals[-1])


@pytest.mark.parametrize("pool", POOLS)
def test_warm_shutdown_waits_for_the_task(shop: Shop, pool: str) -> None:
    (worker,) = shop.start("one", pool=pool)
    result = shop.send("exclusive", "report", 2.0)
    shop.record.wait_for(starts=1)
    assert worker.terminate() == 0
    assert result.get(timeout=LIMIT) == "report"
    assert shop.held() == []


@pytest.mark.parametrize("task", ["exclusive", "late"])
def test_soft_shutdown_waits_and_then_stops_the_task(
    redis_server: RedisServer, shop_on: Callable[..., Shop], task: str
) -> None:
    shop = shop_on(redis_server, singleton_lock_ttl=600.0, worker_soft_shutdown_timeout=1.0)
    (worker,) = shop.start("one")
    shop.send(task, "report", 30.0)
    (run,) = shop.record.wait_for(starts=1)
    quit_at_work(shop, worker)
    assert shop.held() == []
    assert not is_alive(run.pid)


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_cold_shutdown_frees_the_lock(shop: Shop, pool: str) -> None:
    (worker,) = shop.start("one", pool=pool)
    shop.send("exclusive", "report", 30.0)
    (run,) = shop.record.wait_for(starts=1)
    quit_at_work(shop, worker)
    assert not is_alive(run.pid)
    if pool == "gevent" and celery.VERSION[:2] < (5, 5):
        # Its greenlets end without a `finally`: the next task that meets the lock frees it.
        shop.start("two", pool=pool)
        shop.send("exclusive", "report")
        shop.record.wait_for(starts=2, job="report")
        return
    until(lambda: not shop.held())


@pytest.mark.skipif(celery.VERSION[:2] < (5, 6), reason="it stores RETRY, for which the hub of greenlets cannot wait")
def test_cold_shutdown_ends_every_greenlet(shop: Shop) -> None:
    """Their hub runs the signal's handler, which cannot ask the lock server there."""
    (worker,) = shop.start("one", pool="gevent")
    for job in ("one", "another"):
        shop.send("late", job, LONG)
    shop.record.wait_for(starts=2)
    quit_at_work(shop, worker)
    until(lambda: not shop.held())


@pytest.mark.parametrize("signals", [(signal.SIGQUIT,), (signal.SIGINT, signal.SIGINT)], ids=["quit", "ctrl-c"])
def test_message_that_a_cold_shutdown_gives_back_is_run_by_another_worker(shop: Shop, signals: Sequence[int]) -> None:
    (worker,) = shop.start("one")
    result = shop.send("rejected_when_lost", "report", 30.0)
    shop.record.wait_for(starts=1)
    quit_at_work(shop, worker, signals)
    assert shop.held() == []
    shop.start("two")
    assert result.get(timeout=LIMIT) == "report"
    first, second = shop.record.runs("report")
    assert overlaps([first, second]) == []


@pytest.mark.parametrize(
    ("option", "count"),
    [("--max-tasks-per-child", 20), pytest.param("--max-memory-per-child", 10, marks=pytest.mark.slow)],
)
def test_children_are_replaced(shop: Shop, option: str, count: int) -> None:
    shop.start("one", "two", arguments=(option, "1"))
    results = [shop.send("waiting", "report") for _ in range(count)]
    for result in results:
        assert result.get(timeout=LIMIT) == "report"
    runs = shop.record.runs("report")
    assert len({run.pid for run in runs}) == len(runs) == count
    assert overlaps(runs) == []
    assert shop.held() == []


@pytest.mark.slow
def test_autoscale_down_while_a_task_runs(
    redis_server: RedisServer, shop_on: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSCALE_KEEPALIVE", "1")
    shop = shop_on(redis_server, singleton_lock_ttl=600.0)
    (worker,) = shop.start("one", arguments=("--autoscale", "4,1"))
    long = shop.send("exclusive", "long", 12.0)
    short = [shop.send("exclusive", f"job-{n}", 1.0) for n in range(8)]
    for n, result in enumerate(short):
        assert result.get(timeout=LIMIT) == f"job-{n}"
    until(lambda: "Scaling down" in worker.log)
    assert long.get(timeout=LIMIT) == "long"
    assert shop.held() == []
    assert shop.record.runs("lost") == []


def test_pool_restart_waits_for_the_task(shop: Shop) -> None:
    shop.start("one")
    result = shop.send("exclusive", "report", 3.0)
    (run,) = shop.record.wait_for(starts=1)
    shop.app.control.broadcast("pool_restart", arguments={"reload": False})
    assert result.get(timeout=LIMIT) == "report"
    until(lambda: not is_alive(run.pid))
    assert shop.held() == []
    assert shop.send("exclusive", "report").get(timeout=LIMIT) == "report"
