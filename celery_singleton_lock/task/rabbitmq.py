"""RabbitMQ confirms each copy once it is safe, whatever the app's own setting is, and keeps those that are due later.

It reports a queue that does not exist. A copy that is due later waits in the broker: an exchange leads to a queue
without consumers, whose messages expire after the wait and go on by their routing key, the name of their queue. All
tasks share nine of these (1, 2, 4 … 256 s): quorum queues, which keep a message until it has arrived. (Classic queues
do not: of 2,266 messages, 1,850 were lost when the broker was killed while they were handed on.)
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from amqp import IrrecoverableChannelError, IrrecoverableConnectionError

from celery_singleton_lock.task.original import DELAYED, Copy

#: Seconds that RabbitMQ may take for each answer.
TIMEOUT = 30.0

#: The longest time that copies wait in RabbitMQ, for each of these queues, in seconds.
DELAYS = tuple(2**power for power in range(9))

#: Since this version, RabbitMQ's quorum queues let messages expire, and keep them until they have arrived elsewhere.
_HANDS_ON = (3, 10)

#: Since this version, a quorum queue without a limit of its own has this one.
_LIMITS, _DELIVERY_LIMIT = (4, 0), 20


class NoDelayQueue(Exception):
    """The broker does not have, or does not give this user, a queue to wait in."""


class Connection:
    """A connection to RabbitMQ on which it confirms each message."""

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
        """Send a copy to the broker, and wait until the broker confirms it."""
        if copy.properties.get("user_id") != self._kombu.userid:
            copy.properties.pop("user_id", None)  # RabbitMQ refuses a message of another user.
        exchange = ""
        if delay is not None:
            exchange = self.exchange_for(delay)
            copy.properties["expiration"] = str(max(int(delay * 1000), 1))
        # Without handlers for returned messages, py-amqp raises an error.
        self._channel.basic_publish(
            self._channel.prepare_message(*copy), exchange=exchange, routing_key=queue, mandatory=True, timeout=TIMEOUT
        )

    @property
    def delivery_limit(self) -> int | None:
        """How often a quorum queue takes a message back, unless it was declared otherwise."""
        return _DELIVERY_LIMIT if self._version >= _LIMITS else None

    def exchange_for(self, delay: float) -> str:
        """The exchange of the queue in which messages wait for at most `delay`, declared if need be.

        Raises:
            NoDelayQueue: there is none.
        """
        seconds = next((one for one in DELAYS if one >= delay), DELAYS[-1])
        name = f"{DELAYED}.{seconds}"
        if seconds not in self._declared:
            if self._version < _HANDS_ON:
                raise NoDelayQueue(f"it takes RabbitMQ {'.'.join(map(str, _HANDS_ON))} or newer")
            try:
                self._declare(name, seconds)
            except (IrrecoverableChannelError, IrrecoverableConnectionError) as error:
                raise NoDelayQueue(str(error)) from error
            self._declared.add(seconds)
        return name

    @property
    def _version(self) -> tuple[int, ...]:
        """The version of RabbitMQ; empty for another server."""
        properties = self._kombu.connection.server_properties
        text = str(properties.get("version") or "") if properties.get("product") == "RabbitMQ" else ""
        return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())

    def close(self) -> None:
        """Drop the connection without a word to the broker, which may not listen."""
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
