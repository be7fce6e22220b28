"""The private part of redis-py that this package touches; see also `celery_singleton_lock/_celery.py` for Celery's."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from redis import Redis
from redis.cluster import NodesManager, RedisCluster
from redis.connection import Connection
from redis.sentinel import SentinelConnectionPool

#: The versions that were read for this.
LOOKED_AT = {"redis": ("5.0.0", "8.1.0")}


def socket_of(connection: Connection) -> socket.socket:
    """The socket of a connection that is open. redis-py shows neither its descriptor nor its options.

    Promise: one thread waits for several servers at once; what was given up is not sent when the network is back.
    Touches: redis.connection.Connection._sock
    """
    opened: socket.socket = cast("Any", connection)._sock
    return opened


def nodes_of(client: RedisCluster) -> tuple[NodesManager, Sequence[tuple[str, int]], Mapping[str, Any]]:
    """What a cluster's client has for as long as it lives, the nodes that it begins with, and its connections' options,
    none of which refers to the client.

    Promise: the locks of a client share connections, which go with the client.
    Touches: redis.cluster.RedisCluster.nodes_manager, redis.cluster.RedisCluster.user_on_connect_func,
    redis.cluster.NodesManager.startup_nodes, redis.cluster.NodesManager.connection_kwargs
    """
    nodes: NodesManager = client.nodes_manager
    after_login: Callable[[Any], object] | None = cast("Any", client).user_on_connect_func

    def connected(connection: Any) -> None:
        connection.on_connect()
        if after_login is not None:
            after_login(connection)

    start = [(node.host, node.port) for node in nodes.startup_nodes.values()]
    return nodes, start, {**nodes.connection_kwargs, "redis_connect_func": connected}


def sentinels_of(pool: SentinelConnectionPool) -> Sequence[Redis]:
    """The clients of the Sentinels that a pool asks for the master; their order changes.

    Promise: the doctor asks each Sentinel which server is the master; no Redlock has the same master twice.
    Touches: redis.sentinel.SentinelConnectionPool.sentinel_manager, redis.sentinel.Sentinel.sentinels
    """
    sentinels: Sequence[Redis] = cast("Any", pool).sentinel_manager.sentinels
    return sentinels


def attributes_of(shared: object) -> dict[str, Any]:
    """The attributes of a client's pool, or of what a cluster's client has, to which ours can be added.

    Promise: as for `nodes_of`, whatever the clients are.
    Touches: redis.connection.ConnectionPool.__dict__, redis.cluster.NodesManager.__dict__
    """
    return vars(shared)
