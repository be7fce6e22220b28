"""Everything goes wrong, again and again: no two runs of one job overlap, and nothing stays stuck."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.testing import RedisServer
from tests.integration.conftest import FORGETFUL, Shop, redelivering
from tests.integration.workers import Worker
from tests.proxy import LossyProxy
from tests.rabbitmq import MISSING, RabbitMQ
from tests.recording import Run, overlaps
from tests.servers import Nodes

#: Of the locks in these tests (see `shop_on`).
TTL = 2.0

#: Faults in one test; one every second or so.
FAULTS = 25

JOBS = ["report", "billing", "sync"]

#: How the copies behave when they meet a held lock.
CALLS = [{"on_conflict": "skip"}, {"on_conflict": "retry"}, {"wait": 30.0, "on_conflict": "raise"}]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_no_overlap_and_nothing_stuck_whatever_breaks(
    redis_server: RedisServer, own_redis: RedisServer, shop_on: Callable[..., Shop], pool: str
) -> None:
    shop, chance = shop_on(redis_server, locks=own_redis), seeded()
    faults = [kill, pause_worker, stall, drop_connections, forget_scripts]
    storm(shop, redis_server, pool, chance, faults, lambda fault: fault(own_redis, chance))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet"])
def test_no_overlap_on_a_redlock_whose_nodes_die_hang_and_forget(
    redis_server: RedisServer, shop_on: Callable[..., Shop], pool: str
) -> None:
    """Any of the nodes at any time: one that comes back empty has no vote until what it forgot has ended."""
    chance = seeded()
    with Nodes(5) as nodes:
        for server in nodes.servers:
            server.client().set("singleton_lock:memory", 1, px=100_000_000_000)
        shop = shop_on(redis_server, singleton_lock_backend=nodes.url)
        faults = [kill, pause_worker, *[forget, stall, drop_connections, forget_scripts] * 2]
        storm(
            *(shop, redis_server, pool, chance, faults),
            lambda fault: at_once(fault, chance.sample(nodes.servers, chance.choice([1, 1, 2, 3])), chance),
        )


def seeded() -> random.Random:
    """Chance that can be had again."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return random.Random(seed)


def storm(
    shop: Shop,
    broker: RedisServer,
    pool: str,
    chance: random.Random,
    faults: Sequence[Callable[..., None]],
    strike: Callable[[Callable[..., None]], None],
) -> None:
    """Three workers, jobs that exclude each other, and a fault each second: no overlap, and nothing stays stuck.

    Args:
        shop: where that is.
        broker: of the shop.
        pool: of the workers.
        chance: what decides.
        faults: of which one is chosen each time.
        strike: brings about one that is none of a worker's.
    """
    workers = {name: shop.start(name, pool=pool, concurrency=3)[0] for name in ("one", "two", "three")}
    killed_at: dict[int, float] = {}
    for number in range(FAULTS):
        for job in JOBS:
            for _ in range(3):
                shop.send("exclusive", job, chance.choice([0.0, 0.3, 3.0]), singleton_lock=chance.choice(CALLS))
        clock.sleep(chance.uniform(0.2, 1.0))
        fault = chance.choice(faults)
        if fault is kill:
            name = chance.choice(sorted(workers))
            kill(shop, workers[name], killed_at)
            (workers[name],) = shop.start(f"{name}-{number}", pool=pool, concurrency=3)
        elif fault is pause_worker:
            pause_worker(workers[chance.choice(sorted(workers))], chance)
        else:
            strike(fault)
    for worker in workers.values():
        kill(shop, worker, killed_at)
    runs = [ended(run, killed_at) for run in shop.record.runs() if run.job in JOBS]
    assert len(runs) > FAULTS
    assert overlaps(runs) == []
    # Nothing is stuck: one more of each runs as soon as the dead holders' leases are over.
    broker.flush()
    shop.start("heir", pool=pool, concurrency=3)
    for result in [shop.send("exclusive", job, 0.0, singleton_lock=CALLS[2]) for job in JOBS]:
        result.get(timeout=TTL + 10)


def at_once(fault: Callable[..., None], servers: list[RedisServer], chance: random.Random) -> None:
    threads = [threading.Thread(target=fault, args=(server, random.Random(chance.random()))) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def forget(redis: RedisServer, chance: random.Random) -> None:
    """Restarted empty, or flushed."""
    if chance.random() < 0.5:
        redis.restart()
    else:
        redis.flush()


@pytest.mark.slow
@pytest.mark.timeout(1200)
class TestEachMessageIsCarriedOutOnce:
    """Whatever dies; and the broker delivers again and again."""

    def test_redis(self, redis_server: RedisServer, own_redis: RedisServer, shop_on: Callable[..., Shop]) -> None:
        """Children are killed; what takes longer than three seconds is delivered again.

        No whole workers: kombu takes a message off a Redis list before it writes it down, and loses it when it is
        killed in between.
        """
        shop = shop_on(redis_server, locks=own_redis, broker_transport_options=FORGETFUL)
        with redelivering(shop):
            self.run(shop, own_redis, [kill_child, kill_child, drop_connections, forget_scripts])

    @pytest.mark.skipif(bool(MISSING), reason=MISSING)
    def test_rabbitmq(self, redis_server: RedisServer, own_redis: RedisServer, shop_on: Callable[..., Shop]) -> None:
        """Children and whole workers are killed, and their connections to the broker cut."""
        with RabbitMQ() as rabbitmq, LossyProxy(rabbitmq.port) as proxy:
            url = rabbitmq.url.replace(str(rabbitmq.port), str(proxy.port))
            shop = shop_on(redis_server, locks=own_redis, broker_url=url)
            shop.app.conf.broker_url = rabbitmq.url
            faults = [kill, kill_child, kill_child, drop_connections, forget_scripts, lambda *_: proxy.cut()]
            self.run(shop, own_redis, faults)

    def run(self, shop: Shop, locks: RedisServer, faults: list[Callable[..., None]]) -> None:
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
    """It wrote its last line, and its process may have been killed before that could be told to anybody."""
    return run.outcome == "done" and abs(killed_at.get(run.pid, 0.0) - run.end) < 0.1


def kill_child(shop: Shop, chance: random.Random, killed_at: dict[int, float]) -> None:
    """SIGKILL one that runs a task."""
    running = [run.pid for run in shop.record.runs() if run.outcome == "open" and run.pid not in killed_at]
    if not running:
        return
    pid = chance.choice(running)
    killed_at[pid] = clock.now()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill(shop: Shop, worker: Worker, killed_at: dict[int, float]) -> None:
    """SIGKILL, and remember when for the runs that it cuts off."""
    # The time before, not after: as soon as they are dead, their locks are freed.
    now = clock.now()
    worker.kill()
    for run in shop.record.runs():
        if run.outcome == "open" and group_of(run.pid) in (None, worker.process.pid):
            killed_at.setdefault(run.pid, now)


def pause_worker(worker: Worker, chance: random.Random) -> None:
    """Shorter than the time in which a holder trusts its lease: longer pauses are beyond what can be promised."""
    worker.pause()
    clock.sleep(chance.uniform(0.05, TTL / 4))
    worker.resume()


def stall(redis: RedisServer, chance: random.Random) -> None:
    redis.pause()
    clock.sleep(chance.uniform(0.1, 1.5 * TTL))
    redis.resume()


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
