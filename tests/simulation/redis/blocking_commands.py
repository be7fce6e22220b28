"""A command that waits."""

from __future__ import annotations

import math
from typing import Any

from tests.simulation.redis import numbers
from tests.simulation.redis.registry import all_but_last, command
from tests.simulation.redis.replies import CommandError
from tests.simulation.redis.session import Blocked


@command("BLPOP", -3, all_but_last, in_scripts=False)
def blpop(server: Any, args: list[bytes]) -> Any:
    *keys, timeout = args
    seconds = numbers.floating(timeout, "ERR timeout is not a float or out of range")
    if seconds < 0:
        raise CommandError("ERR timeout is negative")
    for key in keys:
        if (found := server.typed(key, list)) is not None:
            element = found.pop(0)
            server.changed(key)
            return [key, element]
    server.block(Blocked(server.ms + math.ceil(seconds * 1000) if seconds else 0, keys=list(dict.fromkeys(keys))))
    return None
