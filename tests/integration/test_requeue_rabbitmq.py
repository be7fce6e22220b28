"""A message that is put back on RabbitMQ is the same message, in its queue, and safe. Skipped without RabbitMQ."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from amqp import ChannelError
from amqp.exceptions import MessageNacked
from celery import Celery
from kombu import Queue

from celery_singleton_lock import clock
from celery_singleton_lock.task.putback import Original, Publisher
from tests.integration import copies
from tests.integration.conftest import Shop, until
from tests.integration.workers import Worker
from tests.patience import LIMIT
from tests.proxy import LossyProxy
from tests.rabbitmq import MISSING, RabbitMQ
from tests.recording import overlaps
from tests.redis_server import RedisServer

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

#: Types of a queue and of its exchange.
KINDS = [("classic", "direct"), ("quorum", "direct"), ("quorum", "topic"), ("classic", "topic")]

#: Types that the quick tests leave out.
LATER = KINDS[1:2] + KINDS[3:]

#: What Celery, from 5.5 on, has RabbitMQ keep messages with that are due later.
CELERYS = "kombu.transport.native_delayed_delivery"


@pytest.fixture
def queue(tmp_path: Path) -> str:
    """The name of a queue that no other test uses."""
    return os.path.basename(tmp_path)


@pytest.fixture
def shop_with(
    rabbitmq: RabbitMQ,
    redis_server: RedisServer,
    shop_on: Callable[..., Shop],
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Shop]:
    """Make a shop with queues of one type, bound to an exchange of one type."""
    monkeypatch.setenv("C_FORCE_ROOT", "1")  # As root, which tests in a container are, Celery refuses pickle.

    def make(queue_type: str, exchange_type: str, **conf: Any) -> Shop:
        names = (queue, f"{queue}-mirror")
        return shop_on(
            redis_server,
            broker_url=rabbitmq.url,
            accept_content=copies.ACCEPTED,
            task_queues=copies.queues(*names, exchange_type=exchange_type, queue_type=queue_type),
            task_default_queue=f"{queue}-default",
            singleton_lock_ttl=60.0,
            **conf,
        )

    return make


@pytest.mark.parametrize(
    ("queue_type", "exchange_type"),
    [pytest.param(*kind, marks=[pytest.mark.slow] if kind in LATER else []) for kind in KINDS],
)
def test_copy_is_the_message(shop_with: Callable[..., Shop], queue: str, queue_type: str, exchange_type: str) -> None:
    way = ["", queue] if exchange_type == "direct" else ["to-topic", f"to.{queue}"]
    copies.check(shop_with(queue_type, exchange_type), queue, way, mirror=f"{queue}-mirror")


def test_broadcast_does_not_multiply(
    rabbitmq: RabbitMQ, redis_server: RedisServer, shop_on: Callable[..., Shop], queue: str
) -> None:
    """Each worker puts its copy back to its own queue: it receives only what was sent and what it put back."""
    shop = shop_on(redis_server, broker_url=rabbitmq.url, test_broadcast=queue, singleton_lock_ttl=60.0)
    shop.start("one", "two")
    shop.send("exclusive", "report", LIMIT, queue="celery")
    shop.record.wait_for(starts=1)
    result = shop.send("patient", "report", exchange=queue, routing_key="all")
    until(lambda: all(f"[{result.id}] on_conflict=retry" in worker.log for worker in shop.workers))
    shop.record.let_end("report")
    assert result.get(timeout=LIMIT) == "report"
    until(lambda: all(_ends(worker, result.id) == 1 for worker in shop.workers))
    # A copy may end before the child that has put it back says so.
    until(lambda: all(_received(worker, result.id) <= 1 + _put_back(worker, result.id) for worker in shop.workers))
    for worker in shop.workers:
        assert _received(worker, result.id) == 1 + _put_back(worker, result.id)
    assert sum(run.task_id == result.id for run in shop.record.runs("report")) == 1


def _received(worker: Worker, identity: str) -> int:
    return worker.log.count(f"[{identity}] received")


def _ends(worker: Worker, identity: str) -> int:
    """How often a message was carried out or dropped."""
    dropped = re.findall(rf"\[{identity}\] .*is already .*; this copy is dropped", worker.log)
    return worker.log.count(f"[{identity}] succeeded") + len(dropped)


def _put_back(worker: Worker, identity: str) -> int:
    """How often it was refused, waited as a stand-by, or came before its end was settled."""
    return len(
        re.findall(
            rf"\[{identity}\] (put back, .*: another task has its lock|is already .*; a copy (checks later|waits))",
            worker.log,
        )
    )


@pytest.mark.slow
def test_refused_copies_leave_room_for_others_on_quorum_queues(shop_with: Callable[..., Shop], queue: str) -> None:
    """If the worker held them until they are due, as behind a direct exchange, they would fill its prefetch."""
    pytest.importorskip(CELERYS)
    shop = shop_with("quorum", "topic")
    shop.start("one", arguments=("-Q", queue))
    shop.send("exclusive", "report", LIMIT, queue=queue)
    shop.record.wait_for(starts=1)
    refused = [shop.send("patient", "report", queue=queue) for _ in range(200)]
    until(lambda: all(f"{result.id}] on_conflict=retry" in shop.workers[0].log for result in refused))
    assert shop.send("echo", "hello", queue=queue).get(timeout=LIMIT / 2) == "hello"


@pytest.mark.slow
def test_user_for_whom_celery_cannot_set_up_delays_is_served_as_on_other_brokers(
    rabbitmq: RabbitMQ, redis_server: RedisServer, shop_on: Callable[..., Shop], queue: str
) -> None:
    rabbitmq.control("add_user", queue, "secret")
    rabbitmq.control("set_permissions", queue, "^(?!celery_delayed).*", "^(?!celery_delayed).*", ".*")
    url = rabbitmq.url.replace("guest:guest", f"{queue}:secret")
    queues = copies.queues(queue, exchange_type="topic", queue_type="quorum")
    shop = shop_on(redis_server, broker_url=url, task_queues=queues, task_default_queue=queue, singleton_lock_ttl=60.0)
    shop.start("one")
    shop.send("exclusive", "report", LIMIT)
    shop.record.wait_for(starts=1)
    results = [shop.send("patient", "report") for _ in range(3)]
    until(lambda: all(f"[{result.id}] on_conflict=retry" in shop.workers[0].log for result in results))
    shop.record.let_end("report")
    assert [result.get(timeout=LIMIT) for result in results] == ["report"] * 3
    (worker,) = shop.workers
    told = re.findall(r"/(\S+)\] messages are not put back through the exchange 'celery_delayed", worker.log)
    assert len(told) == len(set(told)) > 0, "each process says so once"
    assert "cannot be put back" not in worker.log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queue_type", "exchange_type", "pool", "way"),
    [
        *((*kind, "prefork", "killed") for kind in KINDS[:3]),
        ("classic", "direct", "eventlet", "killed"),
        ("quorum", "direct", "threads", "killed"),
        ("quorum", "topic", "gevent", "killed"),
        ("quorum", "direct", "prefork", "stopped"),
        ("classic", "direct", "gevent", "stopped"),
    ],
)
def test_broker_goes_in_each_state_of_a_message(
    redis_server: RedisServer,
    shop_on: Callable[..., Shop],
    queue: str,
    queue_type: str,
    exchange_type: str,
    pool: str,
    way: str,
) -> None:
    """While a message runs, a copy of it waits as insurance, and others wait for the lock, were put back, or are just
    being put back.
    """
    with RabbitMQ() as rabbitmq, LossyProxy(rabbitmq.port) as proxy:
        shop = shop_on(
            redis_server,
            broker_url=rabbitmq.url.replace(str(rabbitmq.port), str(proxy.port)),
            task_queues=copies.queues(queue, exchange_type=exchange_type, queue_type=queue_type),
            task_default_queue=queue,
            singleton_lock_ttl=10.0,
            # See docs/howto/rabbitmq.md.
            worker_enable_prefetch_count_reduction=pool not in ("gevent", "eventlet"),
        )
        shop.app.conf.broker_url = rabbitmq.url
        (worker,) = shop.start("one", pool=pool, concurrency=12, arguments=("-Q", queue))
        running = shop.send("late", "report", 15.0)
        shop.record.wait_for(starts=1)
        proxy.cut()
        until(lambda: re.search(rf"{running.id}\] .*is already running", worker.log))
        waiting = shop.send("waiting", "report")
        refused = [shop.send("patient", "report") for _ in range(3)]
        patience = {"wait": 3, "on_conflict": "retry"}
        leaving = [shop.send("exclusive", "report", singleton_lock=patience) for _ in range(3)]
        until(lambda: all(f"{result.id}] on_conflict=retry" in worker.log for result in refused))
        until(lambda: all(f"{result.id}] received" in worker.log for result in (waiting, *leaving)))
        if way == "killed":
            rabbitmq.pause()
        until(lambda: all(f"{result.id}] on_conflict=retry" in worker.log for result in leaving))
        if way == "killed":
            clock.sleep(1.0)  # Otherwise messages sent without a confirmation would seem to be sent.
            rabbitmq.kill()
        else:
            rabbitmq.stop()
        rabbitmq.restart()
        results = [running, waiting, *refused, *leaving]
        assert [result.get(timeout=LIMIT) for result in results] == ["report"] * len(results)
        runs = shop.record.runs("report")
        assert sorted(run.task_id for run in runs) == sorted(result.id for result in results)
        assert overlaps(runs) == []


@pytest.mark.slow
def test_no_copy_is_kept_for_longer_than_the_consumer_timeout(
    redis_server: RedisServer, shop_on: Callable[..., Shop], queue: str
) -> None:
    """RabbitMQ would close the connection, and Celery would end the worker."""
    with RabbitMQ() as rabbitmq, LossyProxy(rabbitmq.port) as proxy:
        rabbitmq.control("eval", "application:set_env(rabbit, consumer_timeout, 4000).")
        rabbitmq.control("eval", "application:set_env(rabbit, channel_tick_interval, 500).")
        shop = shop_on(
            redis_server,
            broker_url=rabbitmq.url.replace(str(rabbitmq.port), str(proxy.port)),
            task_default_queue=queue,
            # Seconds instead of a minute, since the timeout is four seconds here instead of half an hour.
            test_held=2.0,
        )
        shop.app.conf.broker_url = rabbitmq.url
        (worker,) = shop.start("one", concurrency=3)
        running = shop.send("late", "report", 12.0)
        shop.record.wait_for(starts=1)
        proxy.cut()  # From now on, RabbitMQ waits for the copy.
        refused = [shop.send("patient", "report") for _ in range(3)]
        results = [running, *refused]
        assert [result.get(timeout=LIMIT) for result in results] == ["report"] * len(results)
        assert re.search(rf"{running.id}\] .*is already running", worker.log)
        assert "PRECONDITION_FAILED" not in worker.log
        assert len(shop.record.runs("report")) == len(results)


def test_copy_that_rabbitmq_does_not_take_is_an_error(rabbitmq: RabbitMQ, queue: str) -> None:
    """Otherwise its original would be acknowledged, and the message lost; a connection that was closed is no error."""
    app = Celery("sender", broker=rabbitmq.url, set_as_current=False)
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    with app.connection_for_write() as connection:
        Queue(queue, queue_arguments=arguments)(connection.channel()).declare()
    send = partial(Publisher.of(app).send, header={"put_back": {}}, expires=True, delay=0.0)
    send(_message(queue, 1))
    rabbitmq.control("close_all_connections", "a test")
    with pytest.raises(MessageNacked):
        send(_message(queue, 2))
    with pytest.raises(ChannelError):
        send(_message(f"{queue}-gone", 3))


def _message(queue: str, number: int) -> Original:
    headers = {"task": "any", "id": str(number)}
    properties = {"delivery_mode": 2, "correlation_id": str(number)}
    return Original(properties, b"[[], {}, {}]", "application/json", "utf-8", headers, "reports", queue, queue)
