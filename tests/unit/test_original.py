"""A copy of a message of the first protocol (`task_protocol = 1`)."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest
from celery import Celery
from celery.worker.strategy import proto1_to_proto2
from kombu.message import Message
from kombu.serialization import dumps, loads

from celery_singleton_lock import SingletonTask
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


def receive(app: Celery, *, serializer: str, **parts: Any) -> Any:
    """The request that a task's process gets for a message."""
    made = app.amqp.task_protocols[1]("the id", "job", (1,), **parts.pop("task", {}))
    content_type, content_encoding, body = dumps(made.body, serializer=serializer)
    message = Message(
        body=body,
        headers={**made.headers, **parts.pop("headers", {})},
        properties=made.properties,
        delivery_info={"exchange": "", "routing_key": "celery"},
        content_type=content_type,
        content_encoding=content_encoding,
        accept=ACCEPTED,
        **parts,
    )
    decoded, headers, _, _ = proto1_to_proto2(message, message.decode())
    return SingletonRequest(
        message, app=app, task=app.tasks["job"], hostname="worker@host", body=decoded, headers=headers, decoded=True
    ).context


def copy(request: Any, *, expires: bool = True, eta: str | None = None) -> Copy:
    original = original_of(request)
    assert original is not None
    return original.copy({"id": "the id", "put_back": KNOWN}, expires=expires, eta=eta, accept=["json", "pickle"])


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_message_of_the_first_protocol_is_kept_unchanged(app: Celery, serializer: str) -> None:
    request = receive(app, serializer=serializer, headers={"traceparent": "00-1"})
    original = original_of(request)
    assert original is not None
    assert copy(request).body == original.body
    assert copy(request).headers.keys() == {"traceparent", HEADER}


@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_message_of_the_first_protocol_has_its_times_in_the_body(app: Celery, serializer: str) -> None:
    request = receive(app, serializer=serializer, task={"expires": datetime(2090, 1, 1, tzinfo=timezone.utc)})
    sent = copy(request, expires=False, eta="2080-01-01T00:00:00+00:00")
    body = loads(
        sent.body,
        sent.content_type,
        sent.content_encoding,
        accept=ACCEPTED,
    )
    assert (body["eta"], body["expires"], body["id"]) == ("2080-01-01T00:00:00+00:00", None, "the id")
