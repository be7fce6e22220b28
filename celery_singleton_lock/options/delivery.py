"""When the broker delivers an unacknowledged message again, and how long a message may therefore wait."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: Brokers that do so after a time, and their seconds where none are set.
_VISIBILITY: Mapping[str, float] = {
    **dict.fromkeys(("redis", "rediss", "sentinel"), 3600.0),
    **dict.fromkeys(("sqs", "pgmq", "slmq"), 1800.0),
}

#: Seconds after which RabbitMQ closes the connection of a worker that has not acknowledged a message, by default.
CONSUMER_TIMEOUT = 1800.0

#: Seconds that a put-back message waits at most on RabbitMQ: far below any `consumer_timeout`.
MAX_DELAY_AMQP = 256.0


def visibility_timeout(conf: Any) -> float | None:
    """The seconds after which it does; None where it waits for the connection's end."""
    explicit: Any = (conf.get("broker_transport_options") or {}).get("visibility_timeout")
    if isinstance(explicit, (int, float)) and not isinstance(explicit, bool) and 0 < explicit < math.inf:
        return float(explicit)
    return _VISIBILITY.get(_transport(conf))


def longest_delay(conf: Any) -> float:
    """Seconds that a put-back message may wait at most.

    One that a worker holds for longer than the visibility timeout is delivered again, and multiplies; for RabbitMQ's
    `consumer_timeout`, half an hour by default, the worker's connection is closed.
    """
    timeout = visibility_timeout(conf)
    if timeout is not None:
        return timeout / 2
    return MAX_DELAY_AMQP if is_rabbitmq(conf) else math.inf


def is_rabbitmq(conf: Any) -> bool:
    """Whether the broker speaks AMQP 0.9.1, as RabbitMQ does."""
    return _transport(conf) in ("amqp", "amqps", "pyamqp")


def _transport(conf: Any) -> str:
    """As kombu calls it."""
    url = conf.get("broker_url")
    first = str(url if isinstance(url, str) else next(iter(url or ()), "")).lower()
    scheme, found, _ = first.partition("://")
    return scheme.partition("+")[0] if found else "amqp"
