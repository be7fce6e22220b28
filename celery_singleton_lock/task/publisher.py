"""How a copy gets to its queue: by the queue's name, confirmed by the broker, and later.

RabbitMQ confirms each copy once it is safe, whatever the app's own setting is, and says so if there is no such queue.
There a copy that is due later waits in the broker: an exchange leads to a queue without consumers, whose messages die
when they have waited, and go on by their routing key, the name of their queue. There are nine of these for all tasks
(1, 2, 4 … 256 s): quorum queues, which keep a message until it has arrived. (Classic ones do not: of 2,266 messages,
1,850 were lost when the broker was killed while they were handed on.)

A worker that holds a message until it is due, as Celery's `eta` makes it do, has one place less to take others in, and
holds it unacknowledged, which RabbitMQ bears for half an hour only. That remains where such a queue cannot be had: for
queues that go with their worker, messages that the broker is to drop for their age, users that may not declare
anything, older servers; and for all other brokers.
"""

from __future__ import annotations

import threading
from contextlib import closing, suppress
from datetime import datetime, timezone
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from amqp import IrrecoverableChannelError, IrrecoverableConnectionError
from celery.utils.log import get_logger

from celery_singleton_lock import clock, forks
from celery_singleton_lock._celery import queues_reached
from celery_singleton_lock.task.original import DELAYED, Copy, Original

logger = get_logger(__name__)

#: Seconds that RabbitMQ may take for each answer.
TIMEOUT = 30.0

#: Connections to RabbitMQ for copies, in one process.
MAX_CONNECTIONS = 4

#: The longest time that copies wait in a queue of RabbitMQ's, for each of these queues, seconds.
DELAYS = tuple(2**power for power in range(9))

#: Since this version RabbitMQ's quorum queues let messages die of age, and keep them until they have arrived elsewhere.
_HANDS_ON = (3, 10)

#: Seconds until a user that may not declare queues tries again.
_REFUSED_FOR = 600.0


class Publisher:
    """Sends copies of an app's messages; one for each app and process."""

    def __init__(self, app: Any) -> None:
        self._app_ref = ref(app)  # That keeps us.
        self._speaks_amqp = app.connection_for_write().transport.driver_type == "amqp"
        self._idle: list[_Connection] = []
        self.start_anew()
        forks.start_anew_in_child(self)

    def start_anew(self) -> None:
        _inherited.extend(self._idle)
        self._idle = []
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._eta_until = 0.0

    @classmethod
    def of(cls, app: Any) -> Publisher:
        publisher = _publishers.get(app)
        if publisher is None:
            publisher = _publishers.setdefault(app, cls(app))
        return publisher

    def send(self, original: Original, header: dict[str, Any], *, expires: bool, delay: float) -> None:
        """Send a copy of `original`, with a header of ours, to its queue, due in `delay` seconds.

        Raises:
            Exception: as the transport has them; whether the copy was sent is not known then.
        """
        copy_due_in = partial(self._copy, original, header, expires)
        if not self._speaks_amqp:
            self._put(original, copy_due_in(delay))
            return
        queue = self._queue_of(original)
        if delay <= 0 or not original.lasts or original.may_expire or clock.now() < self._eta_until:
            self._confirmed(copy_due_in(delay), queue, None)
            return
        try:
            self._confirmed(copy_due_in(0.0), queue, delay)
        except _Refused as error:
            self._do_without(error)
            self._confirmed(copy_due_in(delay), queue, None)
        except TimeoutError as error:
            self._do_without(error)  # The others may well answer.
            raise

    def prepare(self) -> str | None:
        """Have RabbitMQ make what messages wait in, when a worker starts; why it does not, if that is so.

        A quorum queue of RabbitMQ's is lost with what is in it, if the server is killed within half a second after it
        was made (seen: 3.10): one that is used is to be older than that.
        """
        if not self._speaks_amqp:
            return None
        try:
            with closing(_Connection(self._app)) as connection:
                for seconds in DELAYS:
                    connection.exchange_for(seconds)
        except _Refused as error:
            self._do_without(error)
            return str(error)
        except Exception as error:  # noqa: BLE001 - py-amqp has many; it is made when it is needed
            logger.debug("nothing is prepared for messages to wait in: %r", error)
        return None

    def _do_without(self, error: Exception) -> None:
        self._eta_until = clock.now() + _REFUSED_FOR
        logger.warning(
            "RabbitMQ gives no queue %s.* to wait in: %s; workers hold what is put back until it is due",
            DELAYED,
            error,
        )

    @property
    def _app(self) -> Any:
        return self._app_ref()

    def _put(self, original: Original, copy: Copy) -> None:
        """Send by one of kombu's virtual transports, whose broker answers by itself."""
        with self._app.producer_or_acquire() as producer:
            queue = self._queue_of(original, producer.channel)
            if (declared := self._app.amqp.queues.get(queue)) is not None:
                producer.maybe_declare(declared)  # Some transports know only what they have declared.
            producer.channel.basic_publish(_message(producer.channel, copy), exchange="", routing_key=queue)

    def _copy(self, original: Original, header: dict[str, Any], expires: bool, delay: float) -> Copy:
        eta = datetime.fromtimestamp(clock.wall() + delay, timezone.utc).isoformat() if delay > 0 else None
        return original.copy(header, expires=expires, eta=eta, accept=self._app.conf.accept_content)

    def _confirmed(self, copy: Copy, queue: str, delay: float | None) -> None:
        with self._places:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._send_on(_Connection(self._app), copy, queue, delay)
            try:
                return self._send_on(connection, copy, queue, delay)
            except _Refused:
                raise
            except Exception as error:  # noqa: BLE001 - py-amqp has many
                logger.debug("the broker has gone since the last copy: %r", error)
            return self._send_on(_Connection(self._app), copy, queue, delay)

    def _send_on(self, connection: _Connection, copy: Copy, queue: str, delay: float | None) -> None:
        try:
            connection.send(copy, queue, delay)
        except BaseException:
            # What it answers still would be taken for the answer to the next.
            connection.close()
            raise
        self._idle.append(connection)

    def _queue_of(self, original: Original, channel: Any = None) -> str:
        """The queue that a message was taken from; kombu's virtual transports do not say it."""
        if original.queue:
            return original.queue
        queues = self._app.amqp.queues.consume_from
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
                "a message came by the exchange %s to a queue of this worker alone, and is put back to %s",
                original.exchange,
                chosen,
            )
        return chosen


class _Connection:
    """A connection to RabbitMQ on which it confirms what it is given."""

    def __init__(self, app: Any) -> None:
        self._declared: set[int] = set()
        self._kombu = app.connection_for_write()
        self._kombu.transport_options["confirm_publish"] = True
        try:
            self._kombu.ensure_connection(
                max_retries=max(len(self._kombu.alt or ()), 1), interval_start=0, interval_step=0.2
            )
            # Nothing else bounds the wait for an answer to a declaration.
            self._kombu.connection.sock.settimeout(TIMEOUT)
            self._channel = self._kombu.default_channel
        except BaseException:
            self.close()
            raise

    def send(self, copy: Copy, queue: str, delay: float | None) -> None:
        """Give a copy to the broker, and wait until it has it for sure."""
        if copy.user is not None and copy.user == self._kombu.userid:
            copy.properties["user_id"] = copy.user
        exchange = ""
        if delay is not None:
            exchange = self.exchange_for(delay)
            copy.properties["expiration"] = str(max(int(delay * 1000), 1))
        # Without handlers for what comes back, py-amqp raises it.
        self._channel.basic_publish(
            _message(self._channel, copy), exchange=exchange, routing_key=queue, mandatory=True, timeout=TIMEOUT
        )

    def exchange_for(self, delay: float) -> str:
        """The exchange to the queue in which messages wait for `delay` at most, declared if need be.

        Raises:
            _Refused: there is none.
        """
        seconds = next((one for one in DELAYS if one >= delay), DELAYS[-1])
        name = f"{DELAYED}.{seconds}"
        if seconds not in self._declared:
            properties = self._kombu.connection.server_properties
            if properties.get("product") != "RabbitMQ" or _version(properties.get("version")) < _HANDS_ON:
                raise _Refused(f"it takes RabbitMQ {'.'.join(map(str, _HANDS_ON))} or newer")
            try:
                self._declare(name, seconds)
            except (IrrecoverableChannelError, IrrecoverableConnectionError) as error:
                raise _Refused(str(error)) from error
            self._declared.add(seconds)
        return name

    def close(self) -> None:
        """Give up the connection, without a word to the broker, which may not listen."""
        with suppress(Exception):
            self._kombu.collect()

    def _declare(self, name: str, seconds: int) -> None:
        arguments = {
            "x-queue-type": "quorum",
            "x-message-ttl": seconds * 1000,
            "x-dead-letter-exchange": "",
            "x-dead-letter-strategy": "at-least-once",
            "x-overflow": "reject-publish",
        }
        self._channel.exchange_declare(name, "fanout", durable=True, auto_delete=False)
        self._channel.queue_declare(name, durable=True, auto_delete=False, arguments=arguments)
        self._channel.queue_bind(name, name)


class _Refused(Exception):
    """The broker does not have, or does not give this user, a queue to wait in."""


def _message(channel: Any, copy: Copy) -> Any:
    return channel.prepare_message(
        copy.body, copy.priority, copy.content_type, copy.content_encoding, copy.headers, copy.properties
    )


def _version(text: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in str(text or "").split(".")[:2] if part.isdigit())


_publishers: WeakKeyDictionary[Any, Publisher] = WeakKeyDictionary()

#: Connections of the process that this one was forked off: to close one here would close it there.
_inherited: list[_Connection] = []
