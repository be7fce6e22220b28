"""What a copy of a message must contain, and what it must not."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery
from kombu.message import Message
from kombu.serialization import dumps, loads

from celery_singleton_lock import SingletonTask
from celery_singleton_lock.task import requeue
from celery_singleton_lock.task.delivery import original_of
from celery_singleton_lock.task.header import HEADER
from celery_singleton_lock.task.original import Copy
from celery_singleton_lock.worker.request import SingletonRequest

ACCEPTED = {"application/json", "application/x-python-serialize"}

KNOWN = {"retries": 0, "conflict": 1}


@pytest.fixture
def app(app: Celery) -> Celery:
    @app.task(base=SingletonTask, shared=False, name="job")
    def job(*args: Any) -> None: ...

    return app


def receive(app: Celery, *, serializer: str = "json", protocol: int = 2, **parts: Any) -> Any:
    """The request that a task's process gets for a message."""

    made = app.amqp.task_protocols[protocol]("the id", "job", (1,), **parts.pop("task", {}))
    content_type, content_encoding, body = dumps(made.body, serializer=serializer)
    message = Message(
        body=body,
        headers={**made.headers, **parts.pop("headers", {})},
        properties={**made.properties, **parts.pop("properties", {})},
        delivery_info={"exchange": "", "routing_key": "celery", **parts.pop("delivery_info", {})},
        content_type=content_type,
        content_encoding=content_encoding,
        accept=ACCEPTED,
        **parts,
    )
    if protocol == 2:
        return SingletonRequest(message, app=app, task=app.tasks["job"], hostname="worker@host").context
    from celery.worker.strategy import proto1_to_proto2

    decoded, headers, _, _ = proto1_to_proto2(message, message.decode())
    return SingletonRequest(
        message, app=app, task=app.tasks["job"], hostname="worker@host", body=decoded, headers=headers, decoded=True
    ).context


def copy(request: Any, *, expires: bool = True, eta: str | None = None) -> Copy:
    original = original_of(request)
    assert original is not None
    return original.copy({"id": "the id", "put_back": KNOWN}, expires=expires, eta=eta, accept=["json", "pickle"])


def test_copy_has_foreign_headers_but_none_of_a_single_delivery(app: Celery) -> None:
    ours = {"queue": "singleton_lock.delay.4", "reason": "expired", "count": 1}
    theirs = {"queue": "failed", "reason": "rejected", "count": 2}
    headers = {
        "traceparent": "00-1",
        "CC": ["another queue"],
        "x-death": [ours, theirs],
        "x-first-death-queue": "singleton_lock.delay.4",
        "x-first-death-reason": "expired",
        "x-first-death-exchange": "singleton_lock.delay.4",
        "x-last-death-queue": "failed",
        "x-delivery-count": 3,
        "redelivered": True,
    }
    request = receive(app, headers=headers)
    assert "x-first-death-queue" not in request.headers
    sent = copy(request).headers
    assert {name: sent[name] for name in headers if name in sent} == {
        "traceparent": "00-1",
        "x-death": [theirs],
        "x-last-death-queue": "failed",
    }


def test_copy_says_how_the_first_message_was_sent(app: Celery) -> None:
    """A retry of its task is sent to the original queue."""
    first = receive(app, delivery_info={"exchange": "reports", "routing_key": "report.daily"})
    sent = copy(first).headers
    second = receive(app, headers=sent)
    assert (second.delivery_info["exchange"], second.delivery_info["routing_key"]) == ("reports", "report.daily")
    assert copy(second).headers[HEADER]["put_back"] == {**KNOWN, "exchange": "reports", "routing_key": "report.daily"}


@pytest.mark.parametrize(
    "forged", [None, "x", {"exchange": 1, "routing_key": "x"}, {"exchange": "x" * 256, "routing_key": ""}]
)
def test_nonsense_about_its_route_is_ignored(app: Celery, forged: object) -> None:
    request = receive(app, headers={HEADER: {"id": "the id", "put_back": forged}})
    assert (request.delivery_info["exchange"], request.delivery_info["routing_key"]) == ("", "celery")


def test_properties_are_kept_except_those_of_a_single_delivery(app: Celery) -> None:
    kept = {"reply_to": "answers", "message_id": "7", "app_id": "shop", "type": "t", "timestamp": 5, "delivery_mode": 1}
    left_out = {"delivery_tag": "x", "body_encoding": "base64", "MessageDeduplicationId": "x", "DelaySeconds": 3}
    sent = copy(receive(app, properties={**kept, **left_out, "priority": 7, "user_id": "web"}))
    assert sent.properties == {**kept, "correlation_id": "the id", "user_id": "web"}
    assert sent.priority == 7


@pytest.mark.parametrize(("expires", "kept"), [(None, "60000"), ("2090-01-01T00:00:00+00:00", None)])
def test_broker_expires_a_copy_only_if_no_worker_would(app: Celery, expires: str | None, kept: str | None) -> None:
    request = receive(app, task={"expires": expires}, properties={"expiration": "60000"})
    assert copy(request).properties.get("expiration") == kept
    assert copy(request).headers["expires"] == expires


def test_copy_of_a_message_that_has_begun_does_not_expire(app: Celery) -> None:
    request = receive(app, task={"expires": "2090-01-01T00:00:00+00:00"}, properties={"expiration": "60000"})
    sent = copy(request, expires=False)
    assert sent.headers["expires"] is None
    assert "expiration" not in sent.properties


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_message_of_the_first_protocol_is_kept_unchanged(app: Celery, serializer: str) -> None:
    request = receive(app, protocol=1, serializer=serializer, headers={"traceparent": "00-1"})
    original = original_of(request)
    assert original is not None
    assert copy(request).body == original.body
    assert copy(request).headers.keys() == {"traceparent", HEADER}


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_message_of_the_first_protocol_has_its_times_in_the_body(app: Celery, serializer: str) -> None:
    request = receive(
        app, protocol=1, serializer=serializer, task={"expires": datetime(2090, 1, 1, tzinfo=timezone.utc)}
    )
    sent = copy(request, expires=False, eta="2080-01-01T00:00:00+00:00")
    body = loads(
        sent.body,
        sent.content_type,
        sent.content_encoding,
        accept=ACCEPTED,
    )
    assert (body["eta"], body["expires"], body["id"]) == ("2080-01-01T00:00:00+00:00", None, "the id")


def test_sender_cannot_forge_the_original(app: Celery) -> None:
    forged = {"singleton_lock_original": ["body", "", "", {}, "", "", "elsewhere", True]}
    original = original_of(receive(app, properties=forged))
    assert original is not None
    assert (original.queue, json.loads(original.body)[0]) == ("celery", [1])


def put_back(known: dict[str, Any]) -> dict[str, Any]:
    """The headers of a copy that knows this."""
    return {HEADER: {"id": "the id", "put_back": known}}


def test_returns_of_the_copies_before_are_counted(app: Celery) -> None:
    known = {"retries": 0, "returned": [2, 0]}
    again = receive(app, headers={**put_back(known), "x-delivery-count": 1})
    assert requeue.returned(again) == 3
    assert requeue._known_of_next(again, "copy", requeue.AS_BEFORE)["returned"] == [3, 0]
    assert requeue.returned(receive(app, headers={"x-delivery-count": 1})) == 1
    assert "returned" not in requeue._known_of_next(receive(app), "copy", requeue.AS_BEFORE)
    retried = put_back({**known, "retries": 1})
    assert requeue.returned(receive(app, headers={**retried, "x-delivery-count": 1})) == 1


def test_returns_are_counted_anew_after_a_dead_letter_exchange(app: Celery) -> None:
    """Somebody sends the message again on purpose: it would be rejected for ever. Our own delays do not count."""
    carried = put_back({"retries": 0, "returned": [4, 0]})
    ours = {"queue": "singleton_lock.delay.4", "reason": "expired", "count": 7}
    waited = receive(app, headers={**carried, "x-death": [ours]})
    assert requeue.returned(waited) == 4
    sent_again = receive(app, headers={**carried, "x-death": [{"queue": "celery", "count": 1}, ours]})
    assert requeue.returned(sent_again) == 0


@pytest.mark.parametrize("forged", [None, True, "x", [], [1], [-1, 0], [True, 0], [1, "0"], [1, 0, 0], {"0": 1}])
@pytest.mark.parametrize("where", ["returned", "x-delivery-count", "x-death"])
def test_forged_returns_count_as_none(app: Celery, forged: object, where: str) -> None:
    known = {"retries": 0, **({"returned": forged} if where == "returned" else {})}
    others = {} if where == "returned" else {where: forged}
    assert requeue.returned(receive(app, headers={**put_back(known), **others})) == 0
