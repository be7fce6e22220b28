"""Copies that wait for a lock in workers' main processes, and start when it is free."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from celery.result import AsyncResult
from kombu import Connection
from redis import Redis

from celery_singleton_lock import clock
from tests.integration.conftest import FORGETFUL, LONG, POOLS, Shop, until
from tests.integration.operators import ask
from tests.patience import LIMIT
from tests.rabbitmq import MISSING, RabbitMQ
from tests.recording import overlaps
from tests.servers import RedisServer

#: Seconds of leases: longer than a busy machine stops a process for.
TTL = 60.0

#: Seconds in which a copy that looked by itself would have looked twice again.
SEVERAL_DELAYS = 4.0


@pytest.fixture
def shop(redis_server: RedisServer, shop_on: Callable[..., Shop]) -> Shop:
    return shop_on(redis_server, singleton_lock_ttl=TTL)


@pytest.fixture
def strict(redis_server: RedisServer, shop_on: Callable[..., Shop]) -> Shop:
    """A shop in which a copy that is not woken waits for as long as the test."""
    return shop_on(redis_server, singleton_lock_ttl=TTL, test_wakes_once=True)


def conflicts(shop: Shop) -> int:
    return shop.log.count(": another task has its lock")


def in_line(shop: Shop) -> int:
    """How many processes wait for locks."""
    with shop.locks() as client:
        return sum(client.zcard(key) for key in client.scan_iter("*:waiting"))


def waiting(shop: Shop) -> list[int]:
    """How many wait for each lock that is held, according to `celery locks list --json`."""
    return [json.loads(line)["waiters"] for line in ask(shop, "list", "--json").stdout.splitlines()]


def delivered(shop: Shop) -> int:
    """How many messages workers have, according to the broker."""
    with Redis.from_url(shop.conf["broker_url"]) as broker:
        return broker.hlen("unacked")


def send(shop: Shop, task: str = "patient", **options: object) -> AsyncResult:
    """Send a copy, which is refused, and waits."""
    (result,) = send_all(shop, 1, task, **options)
    return result


def send_all(shop: Shop, count: int, task: str = "patient", **options: object) -> Sequence[AsyncResult]:
    refused = conflicts(shop)
    results = [shop.send(task, "report", **options) for _ in range(count)]
    until(lambda: conflicts(shop) >= refused + count)
    until(lambda: all(shop.log.count(f"[{result.id}] received") > 1 for result in results))
    until(lambda: in_line(shop) > 0)
    return results


def check(shop: Shop, results: Sequence[AsyncResult]) -> None:
    """Check that all have run, one at a time."""
    assert [result.get(timeout=LIMIT) for result in results] == ["report"] * len(results)
    assert overlaps(shop.record.runs("report")) == []


@pytest.mark.parametrize("pool", [pool for pool in POOLS if "eventlet" not in getattr(pool, "values", ())])
def test_copies_take_no_slot_until_the_lock_is_free(strict: Shop, pool: str) -> None:
    strict.start("one", "two", pool=pool)
    holder = strict.send("exclusive", "report", LONG)
    strict.record.wait_for(starts=1)
    results = send_all(strict, 10)
    clock.sleep(SEVERAL_DELAYS)
    assert conflicts(strict) == 10
    strict.record.let_end("report")
    check(strict, [holder, *results])


def test_first_come_first_served(strict: Shop) -> None:
    strict.start("holding", arguments=("-Q", "held"))
    strict.start("one", concurrency=1)  # Two copies that start together may overtake each other.
    holder = strict.send("exclusive", "report", LONG, queue="held")
    strict.record.wait_for(starts=1)
    results = [send(strict) for _ in range(6)]
    strict.record.let_end("report")
    check(strict, [holder, *results])
    begun = sorted(strict.record.runs("report"), key=lambda run: run.start)
    assert [run.task_id for run in begun] == [holder.id, *(result.id for result in results)]


def test_copies_of_a_killed_process_stop_counting(shop: Shop) -> None:
    shop.start("holding", arguments=("-Q", "held"))
    (killed,) = shop.start("killed")
    shop.send("exclusive", "report", LONG, queue="held")
    shop.record.wait_for(starts=1)
    send_all(shop, 3)
    until(lambda: waiting(shop) == [3])
    killed.kill()
    until(lambda: waiting(shop) == [0])
    shop.record.let_end("report")


def test_killed_main_process_keeps_nobody_else_waiting(shop: Shop) -> None:
    """The broker still has its copies, and delivers them again."""
    shop.start("staying")
    holder = shop.send("exclusive", "report", LONG)
    shop.record.wait_for(starts=1)
    (killed,) = shop.start("killed", arguments=("-Q", "another"))
    results = [*send_all(shop, 4, queue="another"), *send_all(shop, 4)]  # The dead process is the first in line.
    until(lambda: in_line(shop) == 2)
    # Workers have all copies, and none is on its way: kombu would lose it with the killed worker.
    until(lambda: delivered(shop) == len(results))
    killed.kill()
    shop.app.control.add_consumer("another")
    shop.record.let_end("report")
    with Connection(shop.conf["broker_url"], transport_options=FORGETFUL) as connection:

        def are_ready() -> bool:
            # Delivers again what was not acknowledged in time, as a worker does.
            connection.default_channel.qos.restore_visible(num=10, interval=1)
            return all(result.ready() for result in results)

        until(are_ready)
    check(shop, [holder, *results])


def test_worker_that_is_shut_down_leaves_its_copies_to_another(strict: Shop) -> None:
    (going,) = strict.start("going")
    holder = strict.send("exclusive", "report", LONG)
    strict.record.wait_for(starts=1)
    results = send_all(strict, 4)
    strict.start("staying")
    until(lambda: in_line(strict) > 0)
    strict.record.let_end("report")
    assert going.terminate() == 0
    check(strict, [holder, *results])


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.parametrize("kind", ["classic", pytest.param("quorum", marks=pytest.mark.slow)])
def test_on_rabbitmq(
    rabbitmq: RabbitMQ, redis_server: RedisServer, shop_on: Callable[..., Shop], tmp_path: Path, kind: str
) -> None:
    """With quorum queues, each copy that a worker holds takes the place of another message: they begin in turns."""
    shop = shop_on(
        redis_server,
        broker_url=rabbitmq.url,
        task_default_queue=tmp_path.name,
        task_default_queue_type=kind,
        singleton_lock_ttl=TTL,
    )
    shop.start("one", "two")
    holder = shop.send("exclusive", "report", LONG)
    shop.record.wait_for(starts=1)
    if kind == "classic":
        results = send_all(shop, 8)
        clock.sleep(SEVERAL_DELAYS)
        assert conflicts(shop) == 8
    else:
        results = [shop.send("patient", "report") for _ in range(8)]
        until(lambda: conflicts(shop) >= 8)
    shop.record.let_end("report")
    check(shop, [holder, *results])
