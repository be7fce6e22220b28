"""A message as it came from the broker, and the copies that are made of it.

Only the worker's main process has it; the process that runs the task finds it in its request (`delivery`). There it
costs next to nothing: body, headers and properties go to the child anyway, and one pickle holds each of them once. A
copy is the same message, except for where it goes and when. It carries

- the body, byte for byte, with its content type, its encoding and its compression, whichever serializer wrote it;
- all headers: of either protocol of Celery, of stamps, of other libraries;
- all properties: priority, delivery mode, reply_to, correlation id, message id, app id, type, timestamp.

It leaves out, or makes anew, what would be wrong in a copy: what RabbitMQ records of the message's way (a delay in
`x-death`; RabbitMQ would drop the copy as one that goes round), `CC` (which would multiply it), an id for which SQS
would drop it as a duplicate, and the property `expiration` beside `expires`: if RabbitMQ drops a message for its age,
its callers keep waiting; if a worker finds it expired, they do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kombu import serialization
from kombu.compression import compress

from celery_singleton_lock._celery import serializer_of
from celery_singleton_lock.task.header import HEADER

#: The names of our exchanges and queues for delays begin with this.
DELAYED = "singleton_lock.delay"

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

    def copy(self, header: Mapping[str, Any], *, expires: bool, eta: str | None, accept: Any) -> Copy:
        """A copy to be sent.

        Args:
            header: ours.
            expires: whether the copy still expires, if the original does.
            eta: when a worker is to begin it, if not at once.
            accept: content types that the app accepts; to read an old message, which keeps its times in the body.
        """
        headers = {name: value for name, value in self.headers.items() if name not in _NOT_COPIED_HEADERS}
        way = {"exchange": self.exchange, "routing_key": self.routing_key}
        headers[HEADER] = {**header, "put_back": {**header["put_back"], **way}}
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
    """A message to be sent: the arguments of `prepare_message` of kombu's channels."""

    body: Any
    priority: Any
    content_type: Any
    content_encoding: Any
    headers: dict[str, Any]
    properties: dict[str, Any]
