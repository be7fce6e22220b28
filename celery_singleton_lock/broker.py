"""When the broker delivers a message again that nobody has acknowledged."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: Brokers that do so after a time, and their seconds where none are set.
_VISIBILITY: Mapping[str, float] = {
    **dict.fromkeys(("redis", "rediss", "sentinel"), 3600.0),
    **dict.fromkeys(("sqs", "pgmq", "slmq"), 1800.0),
}


def visibility_timeout(conf: Any) -> float | None:
    """The seconds after which it does; None where it waits for the connection's end."""
    explicit: Any = (conf.get("broker_transport_options") or {}).get("visibility_timeout")
    if isinstance(explicit, (int, float)) and not isinstance(explicit, bool) and 0 < explicit < math.inf:
        return float(explicit)
    url = conf.get("broker_url")
    first = str(url if isinstance(url, str) else next(iter(url or ()), "")).lower()
    return _VISIBILITY.get(first.partition("://")[0].partition("+")[0])
