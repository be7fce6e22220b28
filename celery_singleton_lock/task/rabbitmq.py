"""RabbitMQ confirms each copy once it is safe, whatever the app's own setting is, and keeps those that are due later.

It reports a queue that does not exist. In an app with quorum queues, a copy that is due later waits in the broker: an
exchange leads to a queue without consumers, whose messages expire after the wait and go on by their routing key, the
name of their queue. All tasks share nine of these (1, 2, 4 … 256 s): quorum queues, which keep a message until it has
arrived. (Classic queues do not: of 2,266 messages, 1,850 were lost when the broker was killed while they were handed
on.) If 32 messages cannot arrive, since their queue was deleted or is full, they hold up all others. The queues of
Celery's own delayed delivery have the same fault, serve topic exchanges only, and count whole seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from amqp import AccessRefused, ChannelError, IrrecoverableChannelError, IrrecoverableConnectionError

from celery_singleton_lock.holder import new_owner
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

    def send(self, copy: Copy, exchange: str, routing_key: str, delay: float | None) -> None:
        """Send a copy to the broker, and wait until the broker confirms it.

        With `delay` it waits that long in the broker first; then `routing_key` is the name of its queue.
        """
        if copy.properties.get("user_id") != self._kombu.userid:
            copy.properties.pop("user_id", None)  # RabbitMQ refuses a message of another user.
        if delay is not None:
            exchange = self.exchange_for(delay)
            copy.properties["expiration"] = str(max(int(delay * 1000), 1))
        self._publish(self._channel.prepare_message(*copy), exchange, routing_key)

    def try_to_send(self) -> None:
        """Send a message to a queue that does not exist, which RabbitMQ refuses for that, or for want of a right.

        Raises:
            AccessRefused: this user may not send messages by the name of their queue.
        """
        try:
            self._publish(self._channel.prepare_message(b""), "", f"singleton_lock.{new_owner()}")
        except AccessRefused:
            raise
        except ChannelError:  # There is no such queue.
            return

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

    def _publish(self, message: Any, exchange: str, routing_key: str) -> None:
        # Without handlers for returned messages, py-amqp raises an error.
        self._channel.basic_publish(
            message, exchange=exchange, routing_key=routing_key, mandatory=True, timeout=TIMEOUT
        )

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


def is_bound(queue: Any, exchange: str, routing_key: str) -> bool:
    """Whether an app's queue gets the messages of a direct or a topic exchange that have this routing key."""
    bindings = (it for it in (queue, *(queue.bindings or ())) if it.exchange)
    return any(it.exchange.name == exchange and _matches(it, routing_key) for it in bindings)


def _matches(binding: Any, routing_key: str) -> bool:
    if binding.exchange.type == "topic":
        return _has_words((binding.routing_key or "").split("."), routing_key.split("."))
    return bool(binding.exchange.type == "direct" and binding.routing_key == routing_key)


def _has_words(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Whether a topic's pattern (* is any word, # any number of words) matches."""
    if not pattern:
        return not words
    first, *rest = pattern
    if first == "#":
        return any(_has_words(rest, words[start:]) for start in range(len(words) + 1))
    return bool(words) and first in ("*", words[0]) and _has_words(rest, words[1:])
