"""What is known of RabbitMQ's queues before a message is put back there."""

from __future__ import annotations

import math
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue, binding

from celery_singleton_lock.task import publisher
from celery_singleton_lock.task.publisher import Publisher
from celery_singleton_lock.task.rabbitmq import is_bound

TOPIC, DIRECT, FANOUT = (Exchange(kind, type=kind) for kind in ("topic", "direct", "fanout"))


@pytest.mark.parametrize(
    ("pattern", "routing_key", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "a.b.c", False),
        ("a.#", "a", True),
        ("a.#", "a.b.c", True),
        ("#.c", "a.b.c", True),
        ("#.c", "a.b", False),
        ("#", "", True),
        ("a.#.d.*", "a.b.c.d.e", True),
    ],
)
def test_topic_leads_to_queues_by_patterns(pattern: str, routing_key: str, expected: bool) -> None:
    assert is_bound(Queue("one", TOPIC, routing_key=pattern), "topic", routing_key) is expected
    twice = [binding(DIRECT, routing_key="x"), binding(TOPIC, routing_key=pattern)]
    assert is_bound(Queue("one", twice), "topic", routing_key) is expected
    assert is_bound(Queue("one", DIRECT, routing_key="y", bindings=twice), "topic", routing_key) is expected


def test_other_exchanges_lead_nowhere_as_far_as_is_known() -> None:
    assert is_bound(Queue("one", DIRECT, routing_key="a.b"), "direct", "a.b")
    assert not is_bound(Queue("one", DIRECT, routing_key="a.*"), "direct", "a.b")
    assert not is_bound(Queue("one", FANOUT, routing_key="a.b"), "fanout", "a.b")
    assert not is_bound(Queue("one", DIRECT, routing_key="a.b"), "topic", "a.b")
    assert not is_bound(Queue("one"), "", "one")


def test_delayed_message_comes_by_topic_exchanges_alone_and_whatever_is_before_its_key() -> None:
    """Celery binds them so, and RabbitMQ keeps the delay in the routing key."""
    assert is_bound(Queue("one", TOPIC, routing_key="a.*"), "topic", "0.1.a.b", delayed=True)
    assert not is_bound(Queue("one", TOPIC, routing_key="a.*"), "topic", "0.1.a.b")
    assert not is_bound(Queue("one", TOPIC, routing_key="a.*"), "topic", "0.1.a", delayed=True)
    assert not is_bound(Queue("one", DIRECT, routing_key="0.1.a"), "direct", "0.1.a", delayed=True)


def test_message_is_not_sent_to_an_exchange_that_leads_to_several_queues(app: Celery) -> None:
    app.conf.task_queues = [Queue("one", TOPIC, routing_key="a.*"), Queue("two", TOPIC, routing_key="#.b")]
    leads_to = Publisher.of(app)._leads_to
    assert leads_to("one", "topic", "a.c")
    assert not leads_to("two", "topic", "a.c"), "it leads to another one"
    assert not leads_to("one", "topic", "a.b"), "it leads to both"
    assert not leads_to("one", "topic", "x"), "it leads nowhere"


@pytest.mark.parametrize(
    ("product", "version", "limit"),
    [
        ("RabbitMQ", "4.0.5", 20.0),
        ("RabbitMQ", "3.13.7", math.inf),
        ("other", "4.0", math.inf),
        ("RabbitMQ", "", math.inf),
    ],
)
def test_quorum_queue_has_the_limit_that_it_was_declared_with_or_that_of_its_server(
    app: Celery, monkeypatch: pytest.MonkeyPatch, product: str, version: str, limit: float
) -> None:
    connection = app.connection_for_write()
    monkeypatch.setattr(type(connection), "connection", property(lambda _: server))
    server: Any = type("Server", (), {"server_properties": {"product": product, "version": version}})
    monkeypatch.setattr(publisher.Connection, "__init__", lambda self, app: setattr(self, "_kombu", connection))
    app.conf.task_queues = [
        Queue("three", queue_arguments={"x-delivery-limit": 3}),
        Queue("endless", queue_arguments={"x-delivery-limit": -1}),
        Queue("undeclared", queue_arguments={"x-queue-type": "quorum"}),
    ]
    limits = [Publisher.of(app).delivery_limit(name) for name in ("three", "endless", "undeclared", "unknown")]
    assert limits == [3.0, math.inf, limit, limit]


def test_limit_is_unknown_while_the_server_does_not_answer(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    def does_not_answer(*_: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(publisher.Connection, "__init__", does_not_answer)
    assert Publisher.of(app).delivery_limit("celery") == math.inf
    assert Publisher.of(app).refusal() is None
