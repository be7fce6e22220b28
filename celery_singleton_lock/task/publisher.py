"""How a copy gets to its queue: by the queue's name, confirmed by the broker, and after a delay.

A worker holds a copy that is due later, as Celery's `eta` makes it do, and fetches one message more meanwhile. It
cannot do that in an app with quorum queues, where each copy that it holds takes the place of another message, and each
end of the worker counts against the copy (`x-delivery-limit`). For these, Celery has RabbitMQ keep what is due later,
if a topic exchange leads to the queue; so do we, unless the queue goes with its worker, or the broker is to drop the
message for its age.
"""

from __future__ import annotations

import math
import threading
from contextlib import closing
from datetime import datetime, timezone
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from amqp import AccessRefused, NotFound
from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks
from celery_singleton_lock._celery import consumed_queues, delayed_way, queues_reached
from celery_singleton_lock.options.rules import MAX_LIMIT, is_whole
from celery_singleton_lock.task.original import Copy, Original
from celery_singleton_lock.task.rabbitmq import Connection, is_bound

logger = get_logger(__name__)

#: Connections to RabbitMQ for copies, in one process.
MAX_CONNECTIONS = 4

#: Seconds until we try again after RabbitMQ has not kept a message that is due later.
_REFUSED_FOR = 600.0


class Publisher:
    """Sends copies of an app's messages; one for each app and process."""

    def __init__(self, app: Any) -> None:
        self._app_ref = ref(app)  # The app keeps us.
        self._speaks_amqp = app.connection_for_write().transport.driver_type == "amqp"
        self._idle: list[Connection] = []
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        _inherited.extend(self._idle)
        self._idle = []
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._eta_until = 0.0
        #: Whether this user may not write to the default exchange, which knows queues by their names.
        self._is_refused = False

    @classmethod
    def of(cls, app: Any) -> Publisher:
        publisher = _publishers.get(app)
        if publisher is None:
            publisher = _publishers.setdefault(app, cls(app))
        return publisher

    def send(self, original: Original, header: dict[str, Any], *, expires: bool, delay: float) -> None:
        """Send a copy of `original`, with its header, to its queue, due in `delay` seconds.

        With `expires` it still expires if the original does.

        Raises:
            Exception: whatever the transport raises; then it is not known whether the copy was sent.
        """
        copy_due_in = partial(self._copy, original, header, expires)
        if not self._speaks_amqp:
            self._put(original, copy_due_in(delay))
            return
        way = self._delayed_way(original, delay) if delay > 0 else None
        if way is None or not self._is_kept(original, copy_due_in(0.0), way):
            self._to_queue(original, copy_due_in(delay))

    def delivery_limit(self, queue: str) -> float:
        """How often RabbitMQ takes back a message of this quorum queue before it dead-letters it; infinite if unknown.

        A policy may set another limit, but no client can see that.
        """
        declared = self._app.amqp.queues.get(queue)
        limit: Any = ((declared and declared.queue_arguments) or {}).get("x-delivery-limit")
        if limit is None:
            try:
                with closing(Connection(self._app)) as connection:
                    limit = connection.delivery_limit
            except Exception as error:  # noqa: BLE001 - py-amqp has many
                logger.debug("RabbitMQ does not tell its version: %r", error)
        return float(limit) if is_whole(limit, 0, MAX_LIMIT) else math.inf

    def refusal(self) -> str | None:
        """Why RabbitMQ refuses copies that are sent by the name of their queue; None if it does not, as far as is
        known.
        """
        try:
            with closing(Connection(self._app)) as connection:
                connection.try_to_send()
        except AccessRefused as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - py-amqp has many
            logger.debug("RabbitMQ cannot be asked what it allows: %r", error)
        return None

    @property
    def _has_quorum_queues(self) -> bool:
        """Whether Celery finds a quorum queue: then its workers' prefetch counts do not change."""
        return any(
            (queue.queue_arguments or {}).get("x-queue-type") == "quorum" for queue in self._app.amqp.queues.values()
        )

    def _delayed_way(self, original: Original, delay: float) -> tuple[str, str] | None:
        """The exchange and the routing key with which RabbitMQ keeps a copy until it is due, and then passes it on to
        its queue alone; None if it does not do that.
        """
        if not self._has_quorum_queues or not original.lasts or original.may_expire or clock.now() < self._eta_until:
            return None
        way = delayed_way(math.ceil(delay), original.routing_key)
        leads = way is not None and self._leads_to(original.queue, original.exchange, way[1], delayed=True)
        return way if leads else None

    def _is_kept(self, original: Original, copy: Copy, way: tuple[str, str]) -> bool:
        """Have RabbitMQ keep a copy until it is due; False if no worker has set that up, or it does not answer."""
        try:
            self._confirmed(copy, *way, self._app.amqp.queues[original.queue])
        except (AccessRefused, NotFound, TimeoutError) as error:
            self._eta_until = clock.now() + _REFUSED_FOR
            logger.warning(
                "RabbitMQ does not keep messages that are due later: %s; workers hold those that are put back", error
            )
            return False
        return True

    def _to_queue(self, original: Original, copy: Copy) -> None:
        """Send by the name of the queue, or, if this user may not do that, the way that the message came."""
        queue = self._queue_of(original)
        has_way = self._leads_to(queue, original.exchange, original.routing_key)
        if not (has_way and self._is_refused):
            try:
                return self._confirmed(copy, "", queue)
            except AccessRefused as error:
                if not has_way:
                    raise
                logger.warning("%s; messages are put back through the exchange %s", error, original.exchange)
                self._is_refused = True
        self._confirmed(copy, original.exchange, original.routing_key)

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

    def _copy(self, original: Original, header: dict[str, Any], expires: bool, delay: float) -> Copy:
        eta = datetime.fromtimestamp(clock.wall() + delay, timezone.utc).isoformat() if delay > 0 else None
        return original.copy(header, expires=expires, eta=eta)

    def _confirmed(self, copy: Copy, exchange: str, routing_key: str, delayed: Any = None) -> None:
        with self._places:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._send_on(Connection(self._app), copy, exchange, routing_key, delayed)
            try:
                return self._send_on(connection, copy, exchange, routing_key, delayed)
            except (AccessRefused, NotFound):
                raise
            except Exception as error:  # noqa: BLE001 - py-amqp has many
                logger.debug("the connection to the broker broke since the last copy: %r", error)
            return self._send_on(Connection(self._app), copy, exchange, routing_key, delayed)

    def _send_on(self, connection: Connection, copy: Copy, *way: Any) -> None:
        try:
            connection.send(copy, *way)
        except BaseException:
            # A late answer would be taken for the answer to the next copy.
            connection.close()
            raise
        self._idle.append(connection)

    def _queue_of(self, original: Original, channel: Any = None) -> str:
        """The queue that a message was taken from; kombu's virtual transports do not say it."""
        if original.queue:
            return original.queue
        queues = consumed_queues(self._app)
        if channel is not None:
            # As kombu finds the queues of a message that it gives back.
            reached = queues_reached(channel, original.exchange, original.routing_key)
        else:
            reached = {name for name, queue in queues.items() if queue.exchange.name == original.exchange}
        own = sorted(name for name, queue in queues.items() if queue.exchange.type != "fanout")
        chosen = next((name for name in own if name in reached), None)
        if chosen is None:
            # To its exchange, a copy would reach every worker again, and multiply.
            chosen = own[0] if own else str(self._app.conf.task_default_queue)
            logger.warning(
                "a message came through the exchange %s to a queue that only this worker has; it is put back to %s",
                original.exchange,
                chosen,
            )
        return chosen


_publishers: WeakKeyDictionary[Any, Publisher] = WeakKeyDictionary()

#: Connections of the process that this one was forked from: closing one here would close it there.
_inherited: list[Connection] = []
