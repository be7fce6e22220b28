"""A message as it came from the broker, and the copies that are made of it.

The worker's main process takes it down, since only it has it; the process that runs the task finds it in its request.
There it costs next to nothing: body, headers and properties go to the child anyway, and one pickle holds each of them
once. A copy is the same message, as it was, but for what says where and when. It carries

- the body, byte for byte, with its content type, its encoding and its compression, whichever serializer wrote it;
- all headers: of either protocol of Celery, of stamps, of other libraries;
- all properties: priority, delivery mode, reply_to, correlation id, message id, app id, type, timestamp.

Left out, or new, is what would be wrong of a copy: what RabbitMQ writes down of the message's way (a delay of ours in
`x-death`; RabbitMQ would drop the copy as one that goes round), `CC` (which would multiply it), the sender's user id
where the worker is another user (which RabbitMQ refuses), an id by which SQS would drop it as sent twice, and the
property `expiration` beside `expires`: a message that RabbitMQ drops for its age leaves its callers waiting, one that
a worker finds expired does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from kombu import serialization
from kombu.compression import compress

#: The header of a copy that says what we know of it: see `requeue`.
PUT_BACK_HEADER = "singleton_lock_put_back"

#: What the names of our exchanges and queues for delays begin with.
DELAYED = "singleton_lock.delay"

#: Where the request keeps the message: among its properties, which no retry takes along and nobody takes for headers.
_PLACE = "singleton_lock_original"

#: Characters of a name in AMQP at most.
_MAX_NAME = 255

#: Properties that a copy gets in another way, or must not have.
_NOT_COPIED = frozenset(
    (
        *("content_type", "content_encoding", "application_headers", "priority", "expiration", "user_id"),
        # Of kombu's virtual transports: of this one delivery.
        *("delivery_info", "delivery_tag", "body_encoding"),
        # Of SQS: the copy is dropped as sent twice, or waits as long again.
        *("MessageDeduplicationId", "DelaySeconds", "delay_seconds"),
    )
)

#: Headers that brokers write, and which are true of one delivery only; or which send the message elsewhere as well.
_NOT_COPIED_HEADERS = frozenset(("CC", "BCC", "redelivered", "x-delivery-count", "x-acquired-count"))


class Original(NamedTuple):
    """A message as it came.

    Attributes:
        properties: as the broker has them.
        body: not compressed.
        content_type, content_encoding, headers: as the broker has them.
        exchange, routing_key: by which its sender sent it.
        queue: that it was taken from; empty where that is not known.
        lasts: whether that queue stays when its worker goes.
    """

    properties: dict[str, Any]
    body: Any
    content_type: Any
    content_encoding: Any
    headers: dict[str, Any]
    exchange: str
    routing_key: str
    queue: str
    lasts: bool

    @property
    def may_expire(self) -> bool:
        """Whether the broker is to drop it when it has waited for too long."""
        return self.properties.get("expiration") is not None and not self._expires_itself

    def copy(self, header: Mapping[str, Any], *, expires: bool, eta: str | None, accept: Any) -> Copy:
        """A copy to be sent.

        Args:
            header: what we know of it.
            expires: whether it still does, if it did.
            eta: when a worker is to begin it, if that is not at once.
            accept: content types that the app accepts; to read an old message, which keeps its times in the body.
        """
        headers = {name: value for name, value in self.headers.items() if name not in _NOT_COPIED_HEADERS}
        headers[PUT_BACK_HEADER] = {**header, "exchange": self.exchange, "routing_key": self.routing_key}
        body = self.body
        if "task" in headers:
            headers["eta"] = eta
            if not expires:
                headers["expires"] = None
        elif eta is not None or not expires:
            body = self._first_protocol(eta, expires, accept)
        if compression := headers.get("compression"):
            body, headers["compression"] = compress(body, compression)
        properties = {name: value for name, value in self.properties.items() if name not in _NOT_COPIED}
        if expires and self.may_expire:
            properties["expiration"] = self.properties["expiration"]
        priority, user = self.properties.get("priority"), self.properties.get("user_id")
        return Copy(body, self.content_type, self.content_encoding, headers, properties, priority, user)

    @property
    def _expires_itself(self) -> bool:
        """Whether a worker sees that it has expired."""
        return bool(self.headers.get("expires"))

    def _first_protocol(self, eta: str | None, expires: bool, accept: Any) -> Any:
        """The body of a message of the first protocol (`task_protocol = 1`), with other times."""
        accepted = serialization.prepare_accept_content(accept)
        task = serialization.loads(self.body, self.content_type, self.content_encoding, accept=accepted)
        task["eta"] = eta
        if not expires:
            task["expires"] = None
        name = serialization.registry.type_to_name[self.content_type]  # type: ignore[attr-defined] # not in the stubs
        return serialization.dumps(task, serializer=name)[2]


@dataclass(frozen=True, slots=True)
class Copy:
    """A message to be sent, in the parts that kombu makes one of; `user`: whose the original was, for RabbitMQ."""

    body: Any
    content_type: Any
    content_encoding: Any
    headers: dict[str, Any]
    properties: dict[str, Any]
    priority: Any
    user: Any


def take_down(message: Any, request: dict[str, Any]) -> None:
    """Put `message` into the request that its task gets, in the worker's main process.

    A copy says there how it was sent first: what the task retries goes the way that it always went.
    """
    delivery, way = message.delivery_info or {}, request["delivery_info"]
    if message.headers and "x-death" in message.headers:
        _forget_delays(message.headers)
        _forget_delays(request)
    exchange, routing_key = str(delivery.get("exchange") or ""), str(delivery.get("routing_key") or "")
    queue, lasts = (routing_key, True) if not exchange else ("", True)
    if (known := _consumed(message, delivery.get("consumer_tag"))) is not None:
        queue, lasts = known.name, _lasts(known)
    if not exchange and (first := _sent_first(message.headers)) is not None:
        exchange, routing_key = way["exchange"], way["routing_key"] = first
    # A plain tuple, and the properties as they are: each task pays for what is pickled here.
    place = (message.body, message.content_type, message.content_encoding, message.headers or {})
    properties = message.properties if isinstance(message.properties, Mapping) else {}
    request["properties"] = {**properties, _PLACE: (*place, exchange, routing_key, queue, lasts)}


def original_of(request: Any) -> Original | None:
    """The message of a task's request; None where our main process has not taken it down."""
    properties = dict(request.properties or {})
    place = properties.pop(_PLACE, None)
    return Original(properties, *place) if isinstance(place, tuple) else None


def _consumed(message: Any, tag: Any) -> Any:
    """The queue that a message was taken from, on a broker that says for which consumer it is.

    Celery's consumer knows its queues' tags, and py-amqp's channel whom to call for a tag; neither shows it.
    """
    if tag is None:
        return None
    consumer = getattr((getattr(message.channel, "callbacks", None) or {}).get(tag), "__self__", None)
    for name, its in getattr(consumer, "_active_tags", {}).items():
        if its == tag:
            return getattr(consumer, "_queues", {}).get(name)
    return None


def _lasts(queue: Any) -> bool:
    arguments = queue.queue_arguments or {}
    goes = queue.auto_delete or queue.exclusive or queue.expires or "x-expires" in arguments
    return bool(queue.durable and not goes)


def _sent_first(headers: Any) -> tuple[str, str] | None:
    """The exchange and routing key by which a copy's original was sent."""
    known = (headers or {}).get(PUT_BACK_HEADER)
    if not isinstance(known, dict):
        return None
    exchange, routing_key = known.get("exchange"), known.get("routing_key")
    if not (isinstance(exchange, str) and isinstance(routing_key, str)):
        return None
    return (exchange, routing_key) if max(len(exchange), len(routing_key)) <= _MAX_NAME else None


def _forget_delays(headers: dict[str, Any]) -> None:
    """Leave out what RabbitMQ has written down of our delays; of a user's own dead-letter exchange it stays."""
    for which in ("first", "last"):
        if str(headers.get(f"x-{which}-death-queue") or "").startswith(DELAYED):
            for what in ("exchange", "queue", "reason"):
                headers.pop(f"x-{which}-death-{what}", None)
    deaths = headers.pop("x-death", None)
    if isinstance(deaths, list):
        others = [death for death in deaths if not str(_queue_of(death)).startswith(DELAYED)]
        if others:
            headers["x-death"] = others


def _queue_of(death: Any) -> Any:
    return death.get("queue") if isinstance(death, dict) else ""
