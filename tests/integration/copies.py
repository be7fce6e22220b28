"""Messages of every kind, as they were sent and as their put-back copies arrive."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

from celery import Celery
from kombu.utils.encoding import ensure_bytes

from celery_singleton_lock.task.message import HEADER
from tests.integration.conftest import LONG, Shop, until
from tests.patience import LIMIT

#: Content types that a worker accepts only if its settings say so.
ACCEPTED = ["json", "pickle", "yaml", "msgpack"]

_EVERYTHING = {
    "priority": 3,
    "expires": datetime.now(timezone.utc) + timedelta(days=1),
    "time_limit": 300,
    "soft_time_limit": 200,
    "shadow": "seen as this",
    "argsrepr": "<secret>",
    "kwargsrepr": "<secret, too>",
    "reply_to": "answers",
    "ignore_result": False,
    "group_id": "the group",
    "group_index": 4,
    "root_id": "the root",
    "parent_id": "the parent",
    "replaced_task_nesting": 2,
    "headers": {
        "traceparent": "00-1-2-03",
        "x-own": {"nested": [1, None, "ü"]},
        "stamped_headers": ["tenant"],
        "stamps": {"tenant": "acme"},
    },
    "message_id": "one",
    "app_id": "shop",
    "type": "report",
    "timestamp": 1_700_000_000,
}

#: The arguments and options of each kind.
KINDS: Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "json": (("ü", datetime(2030, 1, 2, tzinfo=timezone.utc), Decimal("1.10"), UUID(int=5)), {}),
    "pickle": (({1, 2}, {(1, 2): b"\x00"}), {"serializer": "pickle"}),
    "yaml": (({1: "one"},), {"serializer": "yaml"}),
    "msgpack": ((b"\x00\xff",), {"serializer": "msgpack"}),
    "gzip": (("x" * 1000,), {"compression": "gzip"}),
    "bzip2": ((b"x" * 1000,), {"compression": "bzip2", "serializer": "pickle"}),
    "everything": ((1,), _EVERYTHING),
    "transient": ((1,), {"delivery_mode": 1}),
}


def queues(*names: str, exchange_type: str = "direct", queue_type: str | None = None) -> dict[str, Any]:
    """The setting `task_queues`, with one exchange for all and a binding for each."""
    arguments = {"queue_arguments": {"x-queue-type": queue_type}} if queue_type else {}
    return {
        name: {
            "exchange": f"to-{exchange_type}",
            "exchange_type": exchange_type,
            "routing_key": f"to.{name}",
            **arguments,
        }
        for name in names
    }


def send(shop: Shop, kind: str, job: str, *, queue: str, mirror: str) -> Any:
    """Send a message of a kind to `queue`, and to `mirror` where it can be read as it was sent; returns its result."""
    args, options = KINDS[kind]
    once = {"task_id": f"copy-of-{kind}", "kwargs": {"é": 1}, **options}
    name = "tests.integration.app.described"
    shop.app.send_task(name, (job, *args), queue=mirror, **once)
    return shop.app.send_task(name, (job, *args), queue=queue, **once)


def as_sent(app: Celery, mirror: str) -> dict[str, Any]:
    """The messages as they were sent, by kind."""
    found = {}
    with app.connection_for_write() as connection:
        channel = connection.channel()
        while (message := channel.basic_get(mirror, no_ack=True)) is not None:
            message = channel.message_to_python(message)
            identity = str(message.properties["correlation_id"])
            found[identity.removeprefix("copy-of-")] = message
    return found


def differences(sent: Any, came: Mapping[str, Any]) -> dict[str, Any]:
    """What differs between a copy, as the task `described` saw it, and the message as it was sent: should be empty."""
    found = {}
    if came["body"] != ensure_bytes(sent.body).hex():
        found["body"] = (sent.body, bytes.fromhex(came["body"]))
    if came["content"] != [sent.content_type, sent.content_encoding]:
        found["content"] = came["content"]
    for part, left_out in (("headers", {HEADER, "eta", "x-delivery-count"}), ("properties", _OF_ONE_DELIVERY)):
        before = json.loads(json.dumps(dict(getattr(sent, part)), default=repr))
        for name in (before.keys() | came[part].keys()) - left_out:
            if before.get(name) != came[part].get(name):
                found[f"{part}: {name}"] = (before.get(name), came[part].get(name))
    return found


#: Properties of a single delivery, and of the time at which a broker drops a message.
_OF_ONE_DELIVERY = {"application_headers", "delivery_info", "delivery_tag", "expiration"}


def check(shop: Shop, queue: str, way: list[str], *, mirror: str = "mirror", **options: Any) -> None:
    """Check that refused copies of every kind of message come again as they were sent.

    Args:
        shop: its workers accept every kind of content.
        queue: that a worker takes them from.
        way: the exchange and the routing key with which they are sent.
        mirror: another queue.
        options: of the worker.
    """
    shop.start("one", arguments=("-Q", queue), **options)
    shop.send("exclusive", "report", LONG, queue=queue)
    shop.record.wait_for(starts=1)
    results = {kind: send(shop, kind, "report", queue=queue, mirror=mirror) for kind in KINDS}
    sent = as_sent(shop.app, mirror)
    until(lambda: all(f"[{result.id}] on_conflict=retry" in shop.log for result in results.values()))
    shop.record.let_end("report")
    for kind, result in results.items():
        came = result.get(timeout=LIMIT)
        assert came["put back"] >= 1
        found = differences(sent[kind], came)
        assert found == {}, (kind, found)
        assert (came["queue"], came["way"]) == (queue, way)
