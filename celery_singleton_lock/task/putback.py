"""A message as it came from the broker, the copies that are made of it, and how a copy gets to its queue.

Only the worker's main process has the message as it came; the process that runs the task finds it in its request
(`delivery`). There it costs next to nothing: body, headers and properties go to the child anyway, and one pickle holds
each of them once. A copy is the same message, except for where it goes and when. It carries

- the body, byte for byte, with its content type, its encoding and its compression, whichever serializer wrote it;
- all headers: of Celery, of stamps, of other libraries;
- all properties: priority, delivery mode, reply_to, correlation id, message id, app id, type, timestamp.

It leaves out, or makes anew, what would be wrong in a copy: what RabbitMQ records of the message's way (a delay in
`x-death`; RabbitMQ would drop the copy as one that goes round), `CC` (which would multiply it), an id for which SQS
would drop it as a duplicate, and the property `expiration` beside `expires`: if RabbitMQ drops a message for its age,
its callers keep waiting; if a worker finds it expired, they do not.

A copy is sent by its queue's name, and RabbitMQ confirms it, whatever the app's own settings are. A worker holds a copy
that is due later, as Celery's `eta` makes it do, and fetches one message more meanwhile. It cannot do that in an app
with quorum queues, where each copy that it holds takes the place of another message, and each end of the worker counts
against the copy (`x-delivery-limit`). For these, Celery has RabbitMQ keep what is due later, if a topic exchange leads
to the queue; so do we, unless the queue goes with its worker, or the broker is to drop the message for its age.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from amqp import AccessRefused, NotFound
from celery.utils.log import get_logger
from kombu.compression import compress

from celery_singleton_lock import clock
from celery_singleton_lock._celery import consumed_queues, delayed_way, lead_delayed_to, queues_reached
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.options.rules import MAX_LIMIT, is_whole
from celery_singleton_lock.task.message import HEADER

logger = get_logger(__name__)

#: Seconds that RabbitMQ may take for each answer.
TIMEOUT = 30.0

#: Seconds until a way is tried again that RabbitMQ has refused, or where it has not answered.
REFUSED_FOR = 600.0

#: Since this version of RabbitMQ, a quorum queue without a limit of its own has this one.
_LIMITS, _DELIVERY_LIMIT = (4, 0), 20

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
    """

    properties: dict[str, Any]
    body: Any
    content_type: Any
    content_encoding: Any
    headers: dict[str, Any]
    exchange: str
    routing_key: str
    queue: str

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


class Publisher:
    """Sends copies of an app's messages; one for each app and process."""

    def __init__(self, app: Any) -> None:
        self._app_ref = ref(app)  # The app keeps us.
        self._speaks_amqp = app.connection_for_write().transport.driver_type == "amqp"
        #: The queues to which RabbitMQ leads what it has kept.
        self._led: set[str] = set()
        #: The exchanges that are not there, or to which this user may not write, and until when they are not tried.
        self._refused: dict[str, float] = {}

    @classmethod
    def of(cls, app: Any) -> Publisher:
        publisher = _publishers.get(app)
        if publisher is None:
            publisher = _publishers.setdefault(app, cls(app))
        return publisher

    def send(self, original: Original, header: Mapping[str, Any], *, expires: bool, delay: float) -> None:
        """Send a copy of `original`, with its header, to its queue, due in `delay` seconds.

        With `expires` it still expires if the original does.

        Raises:
            Exception: whatever the transport raises; then it is not known whether the copy was sent.
        """
        eta = datetime.fromtimestamp(clock.wall() + delay, timezone.utc).isoformat() if delay > 0 else None
        copy = original.copy(header, expires=expires, eta=eta)
        if not self._speaks_amqp:
            return self._put(original, copy)
        *others, last = self._ways(original, delay)
        for way in others:
            if clock.now() >= self._refused.get(way.exchange, 0.0):
                try:
                    return self._send_confirmed(copy, way)
                except (AccessRefused, NotFound, TimeoutError) as error:
                    self._refused[way.exchange] = clock.now() + REFUSED_FOR
                    logger.warning("messages are not put back through the exchange %r: %s", way.exchange, error)
        return self._send_confirmed(copy, last)

    def delivery_limit(self, queue: str) -> float:
        """How often RabbitMQ takes back a message of this quorum queue before it dead-letters it; infinite if unknown.

        A policy may set another limit, but no client can see that.
        """
        declared = self._app.amqp.queues.get(queue)
        limit: Any = ((declared and declared.queue_arguments) or {}).get("x-delivery-limit")
        if limit is None:
            try:
                with self._connection() as connection:
                    limit = _DELIVERY_LIMIT if _version(connection) >= _LIMITS else None
            except Exception as error:  # noqa: BLE001 - py-amqp has many
                logger.debug("RabbitMQ does not tell its version: %r", error)
        return float(limit) if is_whole(limit, 0, MAX_LIMIT) else math.inf

    def refusal(self) -> str | None:
        """Why RabbitMQ refuses copies that are sent by the name of their queue; None if it does not, as far as is
        known.
        """
        try:
            self._publish(Copy(b"", None, None, None, {}, {}), _Way("", f"singleton_lock.{new_owner()}"))
        except AccessRefused as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - there is no such queue, or no answer; py-amqp has many
            logger.debug("RabbitMQ has not refused a message for its queue's name: %r", error)
        return None

    def _ways(self, original: Original, delay: float) -> Iterator[_Way]:
        """The ways to its queue alone, the best one first; the last one always leads there if the user may take it.

        A way along which RabbitMQ keeps the message needs no `eta`.
        """
        queue, queues = self._queue_of(original), self._app.amqp.queues
        exchange, routing_key = original.exchange, original.routing_key
        # Where Celery finds a quorum queue, its workers' prefetch counts do not change.
        has_quorum = any((its.queue_arguments or {}).get("x-queue-type") == "quorum" for its in queues.values())
        if delay > 0 and has_quorum and not original.may_expire:
            kept = delayed_way(math.ceil(delay), routing_key)
            if kept is not None and self._leads_to(queue, exchange, kept[1], delayed=True) and _lasts(queues[queue]):
                yield _Way(*kept, delayed=queues[queue])
        yield _Way("", queue)
        if self._leads_to(queue, exchange, routing_key):
            yield _Way(exchange, routing_key)

    def _leads_to(self, queue: str, exchange: str, routing_key: str, *, delayed: bool = False) -> bool:
        """Whether an exchange leads to this queue, and, as far as the app knows, to no other: otherwise copies would
        multiply.
        """
        queues = self._app.amqp.queues.items()
        return {name for name, its in queues if is_bound(its, exchange, routing_key, delayed=delayed)} == {queue}

    @property
    def _app(self) -> Any:
        return self._app_ref()

    def _put(self, original: Original, copy: Copy) -> None:
        """Send through one of kombu's virtual transports, whose broker answers anyway."""
        with self._app.producer_or_acquire() as producer:
            queue = self._queue_of(original, producer.channel)
            if (declared := self._app.amqp.queues.get(queue)) is not None:
                producer.maybe_declare(declared)  # Some transports know only what they have declared.
            producer.channel.basic_publish(producer.channel.prepare_message(*copy), exchange="", routing_key=queue)

    def _send_confirmed(self, copy: Copy, way: _Way) -> None:
        """Send a copy to RabbitMQ, and wait until that confirms it."""
        if way.delayed is not None:
            copy = copy._replace(headers={**copy.headers, "eta": None})
        try:
            return self._publish(copy, way)
        except (AccessRefused, NotFound, TimeoutError):
            raise
        except Exception as error:  # noqa: BLE001 - py-amqp has many
            logger.debug("the connection to the broker broke since it was last used: %r", error)
        return self._publish(copy, way)

    def _publish(self, copy: Copy, way: _Way) -> None:
        with self._connection() as connection:
            if way.delayed is not None and way.delayed.name not in self._led:
                lead_delayed_to(way.delayed, connection)  # Without it, the copy would never arrive.
                self._led.add(way.delayed.name)
            if copy.properties.get("user_id") != connection.userid:
                copy.properties.pop("user_id", None)  # RabbitMQ refuses a message of another user.
            # A channel of its own: on one that the app uses, a late answer would be taken for that to a later message.
            channel = connection.channel()
            message, (exchange, routing_key, _) = channel.prepare_message(*copy), way
            # Without handlers for returned messages, py-amqp raises an error.
            channel.basic_publish_confirm(message, exchange, routing_key, mandatory=True, timeout=TIMEOUT)
            channel.close()

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """One of the app's connections; after an error it is dropped without a word to RabbitMQ, which may hang."""
        connection = self._app.pool.acquire(block=True)
        try:
            most = max(len(connection.alt or ()), 1)
            connection.ensure_connection(max_retries=most, interval_start=0, interval_step=0.2)
            socket = connection.connection.sock
            before = socket.gettimeout()
            socket.settimeout(TIMEOUT)  # Nothing else bounds the wait for an answer to a declaration.
            yield connection
            socket.settimeout(before)
        except BaseException:
            connection.collect()
            raise
        finally:
            connection.release()

    def _queue_of(self, original: Original, channel: Any = None) -> str:
        """The queue that a message was taken from; kombu's virtual transports do not say it."""
        if original.queue:
            return original.queue
        queues, exchange, routing_key = consumed_queues(self._app), original.exchange, original.routing_key
        if channel is not None:
            # As kombu finds the queues of a message that it gives back.
            reached = queues_reached(channel, exchange, routing_key)
        else:
            reached = {name for name, its in queues.items() if is_bound(its, exchange, routing_key)}
        own = sorted(name for name, its in queues.items() if its.exchange.type != "fanout")
        chosen = next((name for name in own if name in reached), None)
        if chosen is None:
            # To its exchange, a copy would reach every worker again, and multiply.
            chosen = own[0] if own else str(self._app.conf.task_default_queue)
            logger.warning(
                "a message came through the exchange %s to a queue that only this worker has; it is put back to %s",
                exchange,
                chosen,
            )
        return chosen


class _Way(NamedTuple):
    """A way to a queue.

    Attributes:
        exchange, routing_key: with which a message is sent.
        delayed: the queue, if RabbitMQ keeps the message on this way until it is due.
    """

    exchange: str
    routing_key: str
    delayed: Any = None


_publishers: WeakKeyDictionary[Any, Publisher] = WeakKeyDictionary()


def is_bound(queue: Any, exchange: str, routing_key: str, *, delayed: bool = False) -> bool:
    """Whether an app's queue gets the messages of a direct or a topic exchange that have this routing key; with
    `delayed`, after RabbitMQ has kept them for Celery, which then binds topic exchanges alone (see `delayed_way`).
    """
    bindings = (it for it in (queue, *(queue.bindings or ())) if it.exchange)
    return any(it.exchange.name == exchange and _matches(it, routing_key, delayed) for it in bindings)


def _matches(binding: Any, routing_key: str, delayed: bool) -> bool:
    if binding.exchange.type != "topic":
        return bool(binding.exchange.type == "direct" and not delayed and binding.routing_key == routing_key)
    words = (["#"] if delayed else []) + (binding.routing_key or "").split(".")
    pattern = "".join(_PATTERNS.get(word) or re.escape(f"{word}.") for word in words)
    return re.fullmatch(pattern, f"{routing_key}.") is not None


#: What stands for any words in a topic, each with its dot.
_PATTERNS = {"*": r"[^.]+\.", "#": r"(?:[^.]*\.)*"}


def _lasts(queue: Any) -> bool:
    """Whether a queue stays when its worker goes."""
    arguments = queue.queue_arguments or {}
    goes = queue.auto_delete or queue.exclusive or queue.expires or "x-expires" in arguments
    return bool(queue.durable and not goes)


def _version(connection: Any) -> tuple[int, ...]:
    """The version of RabbitMQ; empty for another server."""
    properties = connection.connection.server_properties
    text = str(properties.get("version") or "") if properties.get("product") == "RabbitMQ" else ""
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
