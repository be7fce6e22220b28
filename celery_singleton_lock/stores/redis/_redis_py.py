"""The private part of redis-py that this package touches; see also `celery_singleton_lock/_celery.py` for Celery's."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

from redis.connection import Connection

#: The versions that were read for this.
LOOKED_AT = {"redis": ("5.0.0", "8.1.0")}


def socket_of(connection: Connection) -> socket.socket:
    """The socket of a connection that is open.

    Promise: commands for several servers are sent without waiting for one, and their answers are read as they come: no
    silent server delays a renewal on the others.
    Touches: redis.connection.Connection._sock
    """
    opened: socket.socket = cast("Any", connection)._sock
    return opened


@cache
def names_of_library() -> Mapping[str, Any]:
    """The option with which a connection names its library; none before redis-py 7.2.

    Promise: a new connection costs no more than dialing. Without the option redis-py reads the metadata of its own
    package for each connection, which takes longer.
    Touches: redis.driver_info.DriverInfo
    """
    try:
        from redis.driver_info import DriverInfo
    except ImportError:
        return {}
    return {"driver_info": DriverInfo()}
