"""What is known of RabbitMQ's queues before a message is put back there."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from amqp import AccessRefused
from celery import Celery
from kombu import Exchange, Queue, binding

from celery_singleton_lock.task import putback
from celery_singleton_lock.task.putback import Copy, Original, Publisher, is_bound

TOPIC, DIRECT, FANOUT = (Exchange(kind, type=kind) for kind in ("topic", "direct", "fanout"))

#: Where RabbitMQ keeps what is due later, and that no worker is told to wait.
KEPT = ("celery_delayed_27", "kept")


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


def publisher_of(
    app: Celery, kind: str, exchange: Exchange, sent: list[tuple[str, str]], refused: str | None = None
) -> Publisher:
    """On a RabbitMQ that does not let its user write to an exchange."""
    app.conf.task_queues = [Queue("one", exchange, routing_key="a.*", queue_arguments={"x-queue-type": kind})]

    def publish(copy: Copy, way: Any) -> None:
        if way.exchange.rstrip("0123456789") == refused:
            raise AccessRefused("no")
        sent.append((way.exchange, "kept" if copy.headers["eta"] is None else "eta"))

    publisher = Publisher.of(app)
    publisher.__dict__.update(_speaks_amqp=True, _publish=publish)
    return publisher


def message(**properties: Any) -> Original:
    return Original(properties, b"", "application/json", "utf-8", {}, "topic", "a.b", "one")


@pytest.mark.parametrize(
    ("kind", "exchange", "properties", "way"),
    [
        ("quorum", TOPIC, {}, KEPT),
        ("classic", TOPIC, {}, ("", "eta")),
        ("quorum", DIRECT, {}, ("", "eta")),
        ("quorum", TOPIC, {"expiration": "1000"}, ("", "eta")),
    ],
)
def test_rabbitmq_keeps_a_copy_if_it_leads_to_its_quorum_queue_alone(
    app: Celery, kind: str, exchange: Exchange, properties: dict[str, Any], way: tuple[str, str]
) -> None:
    sent = list[tuple[str, str]]()
    publisher_of(app, kind, exchange, sent).send(message(**properties), {"put_back": {}}, expires=True, delay=3.0)
    assert sent == [way]


def test_copy_for_a_queue_that_goes_with_its_worker_is_not_kept(app: Celery) -> None:
    sent = list[tuple[str, str]]()
    publisher = publisher_of(app, "quorum", TOPIC, sent)
    app.amqp.queues["one"].expires = 60
    publisher.send(message(), {"put_back": {}}, expires=True, delay=3.0)
    assert sent == [("", "eta")]


@pytest.mark.parametrize(
    ("refused", "kind", "way"), [("celery_delayed_", "quorum", ("", "eta")), ("", "classic", ("topic", "eta"))]
)
def test_way_that_is_refused_is_tried_once(
    app: Celery, caplog: pytest.LogCaptureFixture, refused: str, kind: str, way: tuple[str, str]
) -> None:
    sent = list[tuple[str, str]]()
    publisher = publisher_of(app, kind, TOPIC, sent, refused)
    for _ in range(2):
        publisher.send(message(), {"put_back": {}}, expires=True, delay=3.0)
    assert sent == [way] * 2
    assert caplog.text.count("are not put back through") == 1


def test_way_that_is_refused_is_tried_again_after_a_while(
    app: Celery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(putback, "REFUSED_FOR", 0.0)
    publisher = publisher_of(app, "quorum", TOPIC, [], "celery_delayed_")
    for _ in range(2):
        publisher.send(message(), {"put_back": {}}, expires=True, delay=3.0)
    assert caplog.text.count("are not put back through") == 2


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
    server = SimpleNamespace(server_properties={"product": product, "version": version})
    monkeypatch.setattr(Publisher, "_connection", lambda _: nullcontext(SimpleNamespace(connection=server)))
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

    monkeypatch.setattr(Publisher, "_connection", does_not_answer)
    assert Publisher.of(app).delivery_limit("celery") == math.inf
    assert Publisher.of(app).refusal() is None
