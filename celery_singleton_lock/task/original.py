"""A message as it came from the broker, and the copies that are made of it.

Only the worker's main process has it; the process that runs the task finds it in its request (`delivery`). There it
costs next to nothing: body, headers and properties go to the child anyway, and one pickle holds each of them once. A
copy is the same message, as it was, but for what says where and when. It carries

- the body, byte for byte, with its content type, its encoding and its compression, whichever serializer wrote it;
- all headers: of either protocol of Celery, of stamps, of other libraries;
- all properties: priority, delivery mode, reply_to, correlation id, message id, app id, type, timestamp.

Left out, or new, is what would be wrong of a copy: what RabbitMQ writes down of the message's way (a delay in
`x-death`; RabbitMQ would drop the copy as one that goes round), `CC` (which would multiply it), an id by which SQS
would drop it as sent twice, and the property `expiration` beside `expires`: a message that RabbitMQ drops for its age
leaves its callers waiting, one that a worker finds expired does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kombu import serialization
from kombu.compression import compress

from celery_singleton_lock._celery import serializer_of

#: The header of a copy that says what we know of it: see `requeue`.
PUT_BACK_HEADER = "singleton_lock_put_back"

#: What the names of our exchanges and queues for delays begin with.
DELAYED = "singleton_lock.delay"

#: Properties that a copy gets in another way, or must not have.
_NOT_COPIED = (
    frozenset(("content_type", "content_encoding", "application_headers", "priority", "expiration"))
    # Of kombu's virtual transports: of this one delivery.
    | {"delivery_info", "delivery_tag", "body_encoding"}
    # Of SQS: the copy is dropped as sent twice, or waits as long again.
    | {"MessageDeduplicationId", "DelaySeconds", "delay_seconds"}
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
        """Whether the broker is to drop it when it has waited for too long: with `expires`, a worker does that."""
        return self.properties.get("expiration") is not None and not self.headers.get("expires")

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
        priority = self.properties.get("priority")
        return Copy(body, priority, self.content_type, self.content_encoding, headers, properties)

    def _first_protocol(self, eta: str | None, expires: bool, accept: Any) -> Any:
        """The body of a message of the first protocol (`task_protocol = 1`), with other times."""
        accepted = serialization.prepare_accept_content(accept)
        task = serialization.loads(self.body, self.content_type, self.content_encoding, accept=accepted)
        task["eta"] = eta
        if not expires:
            task["expires"] = None
        return serialization.dumps(task, serializer=serializer_of(self.content_type))[2]


class Copy(NamedTuple):
    """A message to be sent: what kombu's channels make one of (`prepare_message`)."""

    body: Any
    priority: Any
    content_type: Any
    content_encoding: Any
    headers: dict[str, Any]
    properties: dict[str, Any]
