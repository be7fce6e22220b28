"""When the broker delivers an unacknowledged message again, and how long a message may therefore wait."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: Brokers that redeliver after a timeout, and their default timeout in seconds.
_VISIBILITY: Mapping[str, float] = {
    **dict.fromkeys(("redis", "rediss", "sentinel"), 3600.0),
    **dict.fromkeys(("sqs", "pgmq", "slmq"), 1800.0),
}

#: Seconds after which RabbitMQ by default closes the connection of a worker that has not acknowledged a message.
CONSUMER_TIMEOUT = 1800.0

#: The longest wait in seconds of a requeued message on RabbitMQ: far below any `consumer_timeout`.
MAX_DELAY_AMQP = 256.0


def visibility_timeout(conf: Any) -> float | None:
    """Seconds after which the broker redelivers; None if it waits until the connection ends."""
    explicit: Any = (conf.get("broker_transport_options") or {}).get("visibility_timeout")
    if isinstance(explicit, (int, float)) and not isinstance(explicit, bool) and 0 < explicit < math.inf:
        return float(explicit)
    return _VISIBILITY.get(_transport(conf))


def longest_delay(conf: Any) -> float:
    """The longest time in seconds that a requeued message may wait.

    A message that a worker holds for longer than the visibility timeout is delivered again, and multiplies. After
    RabbitMQ's `consumer_timeout`, half an hour by default, the broker closes the worker's connection.
    """
    timeout = visibility_timeout(conf)
    if timeout is not None:
        return timeout / 2
    return MAX_DELAY_AMQP if is_rabbitmq(conf) else math.inf


def is_rabbitmq(conf: Any) -> bool:
    """Whether the broker speaks AMQP 0.9.1, as RabbitMQ does."""
    return _transport(conf) in ("amqp", "amqps", "pyamqp")


def is_redis(conf: Any) -> bool:
    """Whether the broker is Redis."""
    return _transport(conf) in ("redis", "rediss", "sentinel")


def _transport(conf: Any) -> str:
    """The broker's transport, by kombu's name."""
    url = conf.broker_url  # As Celery reads it: an environment variable comes first.
    first = str(url if isinstance(url, str) else next(iter(url or ()), "")).lower()
    scheme, found, _ = first.partition("://")
    return scheme.partition("+")[0] if found else "amqp"
