"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

#: Below what the system gives to connections (32768 and up): nobody takes them before a server has started, which may
#: be seconds, nor while it is being started again. Those of Redis are above, see `with_bus`.
_SINGLE = range(10_000, 12_000)
_WITH_BUS = range(12_000, 22_000)
_BUS = 10_000


def free() -> int:
    return _free(_SINGLE, [0])


def with_bus() -> int:
    """A free port whose bus of a Redis Cluster, 10000 higher, is free as well."""
    return _free(_WITH_BUS, [0, _BUS])


def _free(candidates: range, offsets: list[int]) -> int:
    while True:
        port = random.SystemRandom().choice(candidates)  # no test seeds it
        with suppress(OSError), ExitStack() as probes:
            for offset in offsets:
                # Not `create_server`, which would share the port of a server that shall start again.
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port + offset))
            return port
