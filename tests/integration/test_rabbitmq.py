"""A broker that marks redelivered messages. Skipped where there is no RabbitMQ."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from celery_singleton_lock import clock
from tests.integration.conftest import Shop, until
from tests.patience import LIMIT
from tests.proxy import LossyProxy
from tests.rabbitmq import MISSING, RabbitMQ
from tests.recording import overlaps
from tests.redis_server import RedisServer

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture
def proxy(rabbitmq: RabbitMQ) -> Iterator[LossyProxy]:
    with LossyProxy(rabbitmq.port) as proxy:
        yield proxy


@pytest.fixture
def shop(
    rabbitmq: RabbitMQ, proxy: LossyProxy, redis_server: RedisServer, shop_on: Callable[..., Shop], tmp_path: object
) -> Shop:
    """A shop whose workers reach the broker through a proxy that can cut them off."""
    queue = os.path.basename(str(tmp_path))
    shop = shop_on(
        redis_server,
        broker_url=rabbitmq.url.replace(str(rabbitmq.port), str(proxy.port)),
        task_default_queue=queue,
        task_track_started=True,
        singleton_lock_ttl=60.0,
    )
    shop.app.conf.broker_url = rabbitmq.url
    return shop


def test_connection_dropped_while_a_task_runs(shop: Shop, proxy: LossyProxy) -> None:
    shop.start("one", "two")
    result = shop.send("late", "report", 8.0)
    shop.record.wait_for(starts=1)
    proxy.cut()
    states = set()
    while not result.ready():
        states.add(result.state)
        if "is already" in shop.log:
            shop.record.let_end("report")
        clock.sleep(0.02)
    assert result.get(timeout=LIMIT) == "report"
    assert states <= {"STARTED", "SUCCESS"}
    # If Celery waits for a slot before it takes the copy, the copy finds the task done.
    until(lambda: "is already" in shop.log)
    until(lambda: "this copy is dropped" in shop.log)
    assert len(shop.record.runs("report")) == 1
    assert shop.state_of(result) == "SUCCESS"


def test_connection_dropped_where_the_worker_then_cancels_its_tasks(shop: Shop, proxy: LossyProxy) -> None:
    """The cancelled run frees its lock before the message comes again, and has left no record of an end."""
    shop.conf["worker_cancel_long_running_tasks_on_connection_loss"] = True
    shop.conf["singleton_lock_ttl"] = 600.0
    shop.start("one")
    result = shop.send("rejected_when_lost", "report", 60.0)
    shop.record.wait_for(starts=1)
    proxy.cut()
    shop.record.wait_for(starts=2, ends=2)
    first, second = shop.record.runs("report")
    assert overlaps([first, second]) == []
    assert (first.outcome, second.outcome) == ("aborted", "done")
    until(lambda: result.state == "SUCCESS")


def test_worker_killed_while_its_task_runs(shop: Shop) -> None:
    shop.start("one", "two", concurrency=1)
    result = shop.send("rejected_when_lost", "report", 60.0)
    (run,) = shop.record.wait_for(starts=1)
    killed_at = clock.now()
    next(worker for worker in shop.workers if worker.process.pid == os.getpgid(run.pid)).kill()
    assert result.get(timeout=LIMIT) == "report"
    first, second = shop.record.runs("report", killed_at=killed_at)
    assert overlaps([first, second]) == []
    assert second.task_id == first.task_id


def test_worker_killed_before_it_acknowledged(shop: Shop) -> None:
    shop.start("one", "two", concurrency=1)
    result = shop.send("late", "report", task_id="dies-stored", link=shop.sign("mark"))
    assert result.get(timeout=LIMIT) == "report"
    until(lambda: any("this copy is dropped" in worker.log for worker in shop.workers))
    shop.record.wait_for(starts=1, job="mark")
    assert len(shop.record.runs("report")) == 1
    assert len(shop.record.runs("mark")) == 1


def test_early_acknowledgement_is_one_run_too(shop: Shop, proxy: LossyProxy) -> None:
    shop.start("one", "two")
    result = shop.send("exclusive", "report", 3.0)
    shop.record.wait_for(starts=1)
    proxy.cut()
    assert result.get(timeout=LIMIT) == "report"
    assert len(shop.record.runs("report")) == 1
