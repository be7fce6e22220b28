"""A message as it came from the broker, and the copies that are made of it.

Only the worker's main process has it; the process that runs the task finds it in its request (`delivery`). There it
costs next to nothing: body, headers and properties go to the child anyway, and one pickle holds each of them once. A
copy is the same message, except for where it goes and when. It carries

- the body, byte for byte, with its content type, its encoding and its compression, whichever serializer wrote it;
- all headers: of Celery, of stamps, of other libraries;
- all properties: priority, delivery mode, reply_to, correlation id, message id, app id, type, timestamp.

It leaves out, or makes anew, what would be wrong in a copy: what RabbitMQ records of the message's way (a delay in
`x-death`; RabbitMQ would drop the copy as one that goes round), `CC` (which would multiply it), an id for which SQS
would drop it as a duplicate, and the property `expiration` beside `expires`: if RabbitMQ drops a message for its age,
its callers keep waiting; if a worker finds it expired, they do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kombu.compression import compress

from celery_singleton_lock.options.rules import MAX_LIMIT, is_whole
from celery_singleton_lock.task.message import HEADER

#: Properties that a copy gets in another way, or must not have.
_NOT_COPIED = (
    frozenset(("content_type", "content_encoding", "application_headers", "priority", "expiration"))
    # From kombu's virtual transports: about this delivery only.
    | {"delivery_info", "delivery_tag", "body_encoding"}
    # From SQS: the copy would be dropped as a duplicate, or wait as long again.
    | {"MessageDeduplicationId", "DelaySeconds", "delay_seconds"}
)

#: Headers that brokers write about one delivery only, or that send the message elsewhere as well.
_NOT_COPIED_HEADERS = frozenset(("CC", "BCC", "redelivered", "x-delivery-count", "x-acquired-count"))


class Original(NamedTuple):
    """A message as it came.

    Attributes:
        properties: as the broker has them.
        body: not compressed.
        content_type, content_encoding, headers: as the broker has them.
        exchange, routing_key: with which its sender sent it.
        queue: the queue that it was taken from; empty if that is not known.
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

    @property
    def returned(self) -> int:
        """How often the broker has taken it back, as far as it counts that: RabbitMQ does in a quorum queue."""
        count: Any = self.headers.get("x-delivery-count")
        return int(count) if is_whole(count, 0, MAX_LIMIT) else 0

    @property
    def deaths(self) -> int:
        """How often RabbitMQ has dead-lettered it."""
        deaths: Any = self.headers.get("x-death")
        entries = deaths if isinstance(deaths, list) else []
        counts: list[Any] = [entry.get("count") for entry in entries if isinstance(entry, dict)]
        return sum(count if is_whole(count, 0, MAX_LIMIT) else 0 for count in counts)

    def copy(self, header: Mapping[str, Any], *, expires: bool, eta: str | None) -> Copy:
        """A copy to be sent.

        Args:
            header: ours.
            expires: whether the copy still expires, if the original does.
            eta: when a worker is to begin it, if not at once.
        """
        headers = {name: value for name, value in self.headers.items() if name not in _NOT_COPIED_HEADERS}
        way = {"exchange": self.exchange, "routing_key": self.routing_key}
        headers[HEADER] = {**header, "put_back": {**header["put_back"], **way}}
        headers["eta"] = eta
        if not expires:
            headers["expires"] = None
        body = self.body
        if compression := headers.get("compression"):
            body, headers["compression"] = compress(body, compression)
        properties = {name: value for name, value in self.properties.items() if name not in _NOT_COPIED}
        if expires and self.may_expire:
            properties["expiration"] = self.properties["expiration"]
        priority = self.properties.get("priority")
        return Copy(body, priority, self.content_type, self.content_encoding, headers, properties)


class Copy(NamedTuple):
    """A message to be sent: the arguments of `prepare_message` of kombu's channels."""

    body: Any
    priority: Any
    content_type: Any
    content_encoding: Any
    headers: dict[str, Any]
    properties: dict[str, Any]
