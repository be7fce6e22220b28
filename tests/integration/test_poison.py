"""A message that kills its whole worker, on a quorum queue with a limit. Skipped where there is no RabbitMQ."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
from kombu import Queue

from tests.integration.conftest import Shop, until
from tests.integration.workers import Worker, environment
from tests.patience import LIMIT
from tests.rabbitmq import MISSING, RabbitMQ
from tests.redis_server import RedisServer

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

#: How often RabbitMQ takes a message back; it is delivered once more than that.
DELIVERY_LIMIT = 3

#: Workers that the tests start for one message at most.
MOST = 12


@pytest.fixture
def queue(tmp_path: Path) -> str:
    """The name of a queue that no other test uses."""
    return os.path.basename(tmp_path)


@pytest.fixture
def shop(rabbitmq: RabbitMQ, redis_server: RedisServer, shop_on: Callable[..., Shop], queue: str) -> Iterator[Shop]:
    """A shop whose messages go to a quorum queue, and from there to another queue if they are rejected."""
    arguments = {
        "x-queue-type": "quorum",
        "x-delivery-limit": DELIVERY_LIMIT,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": f"{queue}-dead",
    }
    shop = shop_on(
        redis_server,
        broker_url=rabbitmq.url,
        task_queues={queue: {"exchange": queue, "routing_key": queue, "queue_arguments": arguments}},
        task_default_queue=queue,
        singleton_lock_ttl=6.0,  # The next worker finds the lock of the one that died.
    )
    with shop.app.connection_for_write() as connection:
        Queue(f"{queue}-dead")(connection.default_channel).declare()
        yield shop


def _dead_letter(shop: Shop, queue: str) -> Any:
    """The message that was dead-lettered; None if there is none."""
    with shop.app.connection_for_read() as connection:
        return connection.default_channel.basic_get(f"{queue}-dead", no_ack=True)


def _dead_letter_after_kills(shop: Shop, queue: str, hosts: Iterator[str]) -> Any:
    """Start a worker whenever the one before it has died, until the message is dead-lettered."""
    for host in islice(hosts, MOST):
        conf = {**shop.conf, "test_host": host}
        env = environment(conf, events=shop.events, record=shop.record.path)
        worker = shop.exits.enter_context(Worker(host, directory=shop.directory, environment=env, concurrency=1))
        shop.workers.append(worker)
        letters: list[Any] = []

        def is_over(worker: Worker = worker, letters: list[Any] = letters) -> bool:
            letters.extend(filter(None, [_dead_letter(shop, queue)]))
            return bool(letters) or worker.process.poll() is not None

        until(is_over)
        worker.kill()
        if letters:
            return letters[0]
    raise AssertionError(f"{MOST} workers died, and the message still comes again")


@pytest.mark.slow
def test_poison_message_is_dead_lettered_like_a_plain_one(shop: Shop, queue: str) -> None:
    """Each worker is in a new container, so that nobody can prove that the one before it has died."""
    hosts = (f"host-{number}" for number in count())
    for task in ("plain_poison", "poison"):
        result = shop.send(task, task)
        letter = _dead_letter_after_kills(shop, queue, hosts)
        assert letter.headers["id"] == result.id
        assert letter.headers["x-death"][0]["queue"] == queue
        assert len(shop.record.runs(task)) == DELIVERY_LIMIT + 1
    assert result.state == "FAILURE"
    assert shop.held() == []
    shop.start("last")
    assert shop.send("exclusive", "poison").get(timeout=LIMIT) == "poison"
