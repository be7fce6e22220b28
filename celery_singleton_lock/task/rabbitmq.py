"""A connection on which RabbitMQ confirms each copy once it is safe, and reports a queue that does not exist, whatever
the app's own settings are; and where an exchange leads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from amqp import AccessRefused, ChannelError

from celery_singleton_lock._celery import lead_delayed_to
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.task.original import Copy

#: Seconds that RabbitMQ may take for each answer.
TIMEOUT = 30.0

#: Since this version, a quorum queue without a limit of its own has this one.
_LIMITS, _DELIVERY_LIMIT = (4, 0), 20


class Connection:
    """A connection to RabbitMQ on which it confirms each message."""

    def __init__(self, app: Any) -> None:
        self._bound: set[str] = set()
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

    def send(self, copy: Copy, exchange: str, routing_key: str, delayed: Any = None) -> None:
        """Send a copy to the broker, and wait until the broker confirms it.

        If it is `delayed`, on its way to that queue, the way is made first: without it, the copy would never arrive.
        """
        if delayed is not None and delayed.name not in self._bound:
            lead_delayed_to(delayed, self._kombu)
            self._bound.add(delayed.name)
        if copy.properties.get("user_id") != self._kombu.userid:
            copy.properties.pop("user_id", None)  # RabbitMQ refuses a message of another user.
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


def is_bound(queue: Any, exchange: str, routing_key: str, *, delayed: bool = False) -> bool:
    """Whether an app's queue gets the messages of a direct or a topic exchange that have this routing key; with
    `delayed`, after RabbitMQ has kept them for Celery, which then binds topic exchanges alone (see `delayed_way`).
    """
    bindings = (it for it in (queue, *(queue.bindings or ())) if it.exchange)
    return any(it.exchange.name == exchange and _matches(it, routing_key, delayed) for it in bindings)


def _matches(binding: Any, routing_key: str, delayed: bool) -> bool:
    if binding.exchange.type == "topic":
        pattern = (binding.routing_key or "").split(".")
        return _has_words(["#", *pattern] if delayed else pattern, routing_key.split("."))
    return bool(binding.exchange.type == "direct" and not delayed and binding.routing_key == routing_key)


def _has_words(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """Whether a topic's pattern (* is any word, # any number of words) matches."""
    if not pattern:
        return not words
    first, *rest = pattern
    if first == "#":
        return any(_has_words(rest, words[start:]) for start in range(len(words) + 1))
    return bool(words) and first in ("*", words[0]) and _has_words(rest, words[1:])
