"""What the locks of a client share: a store with its connections, and its part of the heartbeat.

Clients that connect in the same way share one: a program that makes a client for each lock has as many connections for
it as one that makes a single client. It goes with the last of them, and so do its connections. Nothing here keeps a
client alive: what a client shares hangs on its connection pool, and is found by others through a weak reference only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from redis import Redis
from redis.cluster import NodesManager, RedisCluster
from redis.connection import ConnectionPool
from redis.sentinel import SentinelConnectionPool

from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.mutex import Mutex
from celery_singleton_lock.stores.redis.cluster import Cluster
from celery_singleton_lock.stores.redis.redlock.store import RedlockStore
from celery_singleton_lock.stores.redis.server import OF_A_POOL, Server
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.stores.store import Store

#: The key by which a node of a Redlock knows since when it remembers.
_MEMORY = "singleton_lock:memory"

#: Where a pool has what it shares.
_ATTRIBUTE = "_singleton_lock_keepers"

#: And where it has what its last lock got.
_LATEST = "_singleton_lock_latest"

#: Options that make no difference to our connections.
_INDIFFERENT = frozenset({*OF_A_POOL, "connection_pool", "driver_info", "himport_registry", "retry", "retry_on_error"})


class Keeper:
    """What some locks share."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.heartbeat = Heartbeat(store)
        # Not when the process ends: it closes everything.
        weakref.finalize(self, store.close).atexit = False


class _Latest(NamedTuple):
    """What a pool's last lock got, for as long as the pool connects in the same way."""

    replicas: int
    connects_by: type
    options: Mapping[str, Any]
    keeper: Keeper


#: By how the clients connect.
_keepers: WeakValueDictionary[object, Keeper] = WeakValueDictionary()
_making = Mutex()


def kept_by(client: Redis | RedisCluster, replicas: int) -> Keeper:
    """What the locks of this client, and of others that connect in the same way, share.

    Raises:
        TypeError: it is no client that can be used here.
    """
    if (latest := _latest(getattr(client, "connection_pool", None), replicas)) is not None:
        return latest
    if isinstance(client, RedisCluster):
        nodes: NodesManager = client.nodes_manager
        start = [(node.host, node.port) for node in nodes.startup_nodes.values()]
        config = "cluster", replicas, frozenset(start), _frozen(nodes.connection_kwargs)
        return _keeper(nodes, config, lambda: RedisStore(_cluster(nodes, start), "the cluster", replicas=replicas))
    pool = _pool_of(client)

    def open_store() -> Store:
        server = Server(pool)
        return RedisStore(server, str(server), replicas=replicas)

    keeper = _keeper(pool, ("server", replicas, _config(pool)), open_store)
    # A Sentinel's pool may find its master elsewhere; what is changed in place equals itself.
    known = not isinstance(pool, SentinelConnectionPool)
    if known and not any(isinstance(value, (Mapping, list)) for value in pool.connection_kwargs.values()):
        vars(pool)[_LATEST] = _Latest(replicas, pool.connection_class, dict(pool.connection_kwargs), keeper)
    return keeper


def kept_by_each(clients: Sequence[Redis], restart_delay: bool) -> Keeper:
    """What the Redlocks of these clients share; see `kept_by`."""
    pools = [_pool_of(client) for client in clients]

    def open_store() -> Store:
        servers = [Server(pool) for pool in pools]
        return RedlockStore(servers, ";".join(map(str, servers)), memory=_MEMORY if restart_delay else None)

    return _keeper(pools[0], ("redlock", restart_delay, *map(_config, pools)), open_store)


def address_of(client: Redis) -> str:
    """The server of a client, whatever the database; for people as well.

    Raises:
        TypeError: it is no client that can be used here.
    """
    pool = _pool_of(client)
    if isinstance(pool, SentinelConnectionPool):
        return f"{pool.service_name} of {_sentinels(pool)}"
    return str(Server(pool)).rpartition("/")[0] or str(Server(pool))


def _pool_of(client: Any) -> ConnectionPool:
    pool = getattr(client, "connection_pool", None)
    if isinstance(pool, ConnectionPool):
        return pool
    kind = f"{type(client).__module__}.{type(client).__qualname__}"
    asynchronous = (
        "; for one of redis.asyncio, make a client of redis.Redis and call the lock in a thread (asyncio.to_thread)"
        if kind.startswith("redis.asyncio.")
        else ""
    )
    raise TypeError(f"a lock's client is {kind}; allowed: redis.Redis or redis.RedisCluster{asynchronous}")


def _latest(pool: Any, replicas: int) -> Keeper | None:
    """What a lock of this client gets as the last one did: a program may make a lock object each time."""
    latest: _Latest | None = getattr(pool, _LATEST, None)
    if latest is None or latest.replicas != replicas or latest.connects_by is not pool.connection_class:
        return None
    # Whoever shares the pool may have changed them: a password, say.
    return latest.keeper if latest.options == pool.connection_kwargs else None


def _keeper(of: object, config: object, open_store: Callable[[], Store]) -> Keeper:
    with _making.lock:
        keeper = _keepers.get(config)
        if keeper is None:
            keeper = _keepers[config] = Keeper(open_store())
        # Hangs on the pool itself: a weak dictionary of ours would keep alive what its values refer to.
        vars(of).setdefault(_ATTRIBUTE, {})[config] = keeper
        return keeper


def _cluster(nodes: NodesManager, start: Sequence[tuple[str, int]]) -> Cluster:
    left_out = {"host", "port", *OF_A_POOL}
    options = {name: value for name, value in nodes.connection_kwargs.items() if name not in left_out}

    def pool_of(host: str, port: int) -> ConnectionPool:
        return ConnectionPool(host=host, port=port, **options)

    return Cluster(start, pool_of)


def _config(pool: ConnectionPool) -> object:
    """How the pool connects, as a value that equals another one's."""
    options = pool.connection_class, _frozen(pool.connection_kwargs)
    if isinstance(pool, SentinelConnectionPool):
        sentinels = tuple(_config(one.connection_pool) for one in pool.sentinel_manager.sentinels)
        return *options, pool.service_name, pool.is_master, _sentinels(pool), sentinels
    return options


def _sentinels(pool: SentinelConnectionPool) -> str:
    return ",".join(str(Server(one.connection_pool)) for one in pool.sentinel_manager.sentinels)


def _frozen(options: Mapping[str, Any]) -> object:
    return frozenset((name, _compared(value)) for name, value in options.items() if name not in _INDIFFERENT)


def _compared(value: Any) -> object:
    if value is None or isinstance(value, (str, bytes, int, float, type)):
        return type(value), value
    if isinstance(value, Mapping):
        return frozenset((name, _compared(it)) for name, it in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_compared, value))
    # Anything else equals itself only; it lives at least as long as the store that was made with it.
    return "object", id(value)
