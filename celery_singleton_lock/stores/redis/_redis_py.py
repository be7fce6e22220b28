"""The private parts of redis-py that this package touches; `tests/unit/private_parts.py` lists and tests them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from redis import Redis
from redis.cluster import NodesManager, RedisCluster
from redis.connection import Connection
from redis.sentinel import SentinelConnectionPool

#: Options that refer to the pool of redis-py (since redis-py 8): they would keep it alive, and so its client, and have
#: nothing to do with our connections.
OF_A_POOL = frozenset(
    {"maint_notifications_config", "maint_notifications_pool_handler", "oss_cluster_maint_notifications_handler"}
)


def socket_of(connection: Connection) -> socket.socket:
    """The socket of a connection that is open. redis-py shows neither its descriptor nor its options."""
    opened: socket.socket = cast("Any", connection)._sock
    return opened


def nodes_of(client: RedisCluster) -> tuple[Sequence[tuple[str, int]], Mapping[str, Any]]:
    """A cluster client's first nodes, and its connections' options, none of which refers to the client."""
    nodes: NodesManager = client.nodes_manager
    after_login: Callable[[Any], object] | None = cast("Any", client).user_on_connect_func

    def connected(connection: Any) -> None:
        connection.on_connect()
        if after_login is not None:
            after_login(connection)

    start = [(node.host, node.port) for node in nodes.startup_nodes.values()]
    left_out = {"host", "port", *OF_A_POOL}
    given = {name: value for name, value in nodes.connection_kwargs.items() if name not in left_out}
    return start, {**given, "redis_connect_func": connected}


def sentinels_of(pool: SentinelConnectionPool) -> Sequence[Redis]:
    """The clients of the Sentinels that a pool asks for the master; their order changes."""
    sentinels: Sequence[Redis] = cast("Any", pool).sentinel_manager.sentinels
    return sentinels
