"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

#: Below the ports that the system gives to connections (32768 and up): nobody takes one before a server has started,
#: which may take seconds, or while it is being restarted. The ports of Redis are above, see `with_bus`.
_SINGLE = range(10_000, 12_000)
_WITH_BUS = range(12_000, 22_000)
_BUS = 10_000


def free() -> int:
    return _free(_SINGLE, [0])


def with_bus() -> int:
    """A free port whose bus port for a Redis Cluster, 10000 higher, is free as well."""
    return _free(_WITH_BUS, [0, _BUS])


def _free(candidates: range, offsets: list[int]) -> int:
    while True:
        port = random.SystemRandom().choice(candidates)  # no test seeds it
        with suppress(OSError), ExitStack() as probes:
            for offset in offsets:
                # Not `create_server`, which would share the port of a server that is to be restarted.
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            return port
