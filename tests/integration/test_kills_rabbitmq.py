"""Workers and their children are killed, and cut off from RabbitMQ: each message is carried out once."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from celery_singleton_lock import clock
from tests.integration.conftest import Shop
from tests.integration.workers import Worker
from tests.proxy import LossyProxy
from tests.rabbitmq import MISSING, RabbitMQ
from tests.recording import Run, overlaps
from tests.redis_server import RedisServer

#: Faults in a test, about one every second.
FAULTS = 25

JOBS = ["report", "billing", "sync"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_each_message_is_carried_out_once(
    redis_server: RedisServer, own_redis: RedisServer, shop_on: Callable[..., Shop]
) -> None:
    """Unlike kombu's lists on Redis (`tests/storm`), RabbitMQ loses no message that a worker has just got."""
    with RabbitMQ() as rabbitmq, LossyProxy(rabbitmq.port) as proxy:
        url = rabbitmq.url.replace(str(rabbitmq.port), str(proxy.port))
        shop = shop_on(redis_server, locks=own_redis, broker_url=url)
        shop.app.conf.broker_url = rabbitmq.url
        faults = [kill, kill_child, kill_child, drop_connections, forget_scripts, lambda *_: proxy.cut()]
        storm(shop, own_redis, faults)


def storm(shop: Shop, locks: RedisServer, faults: list[Callable[..., None]]) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    workers = {name: shop.start(name, concurrency=3)[0] for name in ("one", "two", "three")}
    killed_at: dict[int, float] = {}
    results = []
    for number in range(FAULTS):
        results += [shop.send("certain", job, chance.choice([0.0, 0.1, 0.5])) for job in JOBS]
        results.append(shop.send("certain", f"long-{number}", chance.choice([2.0, 5.0])))
        clock.sleep(chance.uniform(0.2, 1.0))
        fault = chance.choice(faults)
        if fault is kill:
            name = chance.choice(sorted(workers))
            kill(shop, workers[name], killed_at)
            (workers[name],) = shop.start(f"{name}-{number}", concurrency=3)
        elif fault is kill_child:
            kill_child(shop, chance, killed_at)
        else:
            fault(locks, chance)
    for result in results:
        result.get(timeout=120)
    runs = [ended(run, killed_at) for run in shop.record.runs()]
    assert overlaps(runs) == []
    sure = [run for run in runs if run.outcome == "done" and not cut_off_at_its_end(run, killed_at)]
    assert set(Counter(run.task_id for run in sure).values()) == {1}
    assert {run.task_id for run in runs if run.outcome == "done"} == {result.id for result in results}


def cut_off_at_its_end(run: Run, killed_at: dict[int, float]) -> bool:
    """It wrote its last line, and its process may have been killed before it could report its end."""
    return run.outcome == "done" and abs(killed_at.get(run.pid, 0.0) - run.end) < 0.1


def kill_child(shop: Shop, chance: random.Random, killed_at: dict[int, float]) -> None:
    """Send SIGKILL to a child that runs a task."""
    running = [run.pid for run in shop.record.runs() if run.outcome == "open" and run.pid not in killed_at]
    if not running:
        return
    pid = chance.choice(running)
    killed_at[pid] = clock.now()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill(shop: Shop, worker: Worker, killed_at: dict[int, float]) -> None:
    """Send SIGKILL, and remember the time for the runs that it cuts off."""
    # The time before, not after: their locks are freed as soon as they are dead.
    now = clock.now()
    worker.kill()
    for run in shop.record.runs():
        if run.outcome == "open" and group_of(run.pid) in (None, worker.process.pid):
            killed_at.setdefault(run.pid, now)


def drop_connections(redis: RedisServer, chance: random.Random) -> None:
    with redis.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)


def forget_scripts(redis: RedisServer, chance: random.Random) -> None:
    with redis.client() as client:
        client.script_flush()


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def ended(run: Run, killed_at: dict[int, float]) -> Run:
    return replace(run, end=killed_at.get(run.pid, run.end)) if run.outcome == "open" else run
