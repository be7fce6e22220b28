"""The store that the locks of a client share, with its connections, and its part of the heartbeat.

Clients that connect in the same way share one store: a program that makes a client for each lock opens no more
connections than a program with a single client. The store goes with the last of the clients, and so do its connections.
Nothing here keeps a client alive: what a client shares hangs on its connection pool, and others find it through a weak
reference only.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from redis import Redis
from redis.cluster import RedisCluster
from redis.connection import ConnectionPool
from redis.sentinel import SentinelConnectionPool

from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.mutex import Mutex
from celery_singleton_lock.stores.redis._redis_py import attributes_of, nodes_of, sentinels_of
from celery_singleton_lock.stores.redis.cluster import Cluster
from celery_singleton_lock.stores.redis.redlock.store import RedlockStore
from celery_singleton_lock.stores.redis.server import OF_A_POOL, Server
from celery_singleton_lock.stores.redis.store import RedisStore
from celery_singleton_lock.stores.store import Store

#: The key that says since when a node of a Redlock remembers.
_MEMORY = "singleton_lock:memory"

#: The attribute of a pool with what it shares.
_ATTRIBUTE = "_singleton_lock_stores"

#: The attribute of a pool with what its last lock got.
_LATEST = "_singleton_lock_latest"

#: Options that make no difference to our connections.
_INDIFFERENT = frozenset({*OF_A_POOL, "connection_pool", "driver_info", "himport_registry", "retry", "retry_on_error"})


class SharedStore:
    """A store, with its heartbeat, that some locks share."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.heartbeat = Heartbeat(store)
        # Not when the process ends: it closes everything.
        weakref.finalize(self, store.close).atexit = False


class _Connects(NamedTuple):
    """How a pool connects, without keeping the pool alive: it may be one of several, and hang on another one."""

    pool: weakref.ref[ConnectionPool]
    by: type
    options: Mapping[str, Any]
    #: The number of all options, also of those that refer to the pool.
    size: int

    @classmethod
    def of(cls, pool: ConnectionPool) -> _Connects:
        given = pool.connection_kwargs
        options = {name: value for name, value in given.items() if name not in OF_A_POOL}
        return cls(weakref.ref(pool), pool.connection_class, options, len(given))

    def is_that_of(self, pool: object) -> bool:
        own = self.pool()
        if own is None or own is not pool or self.by is not own.connection_class:
            return False
        # Other users of the pool may have changed them: a password, for example.
        given = own.connection_kwargs
        return len(given) == self.size and self.options.items() <= given.items()


class _Latest(NamedTuple):
    """What the last lock of some pools got, for as long as they connect in the same way."""

    way: object
    pools: Sequence[_Connects]
    shared: SharedStore


#: The shared stores, by how their clients connect.
_shared_stores: WeakValueDictionary[object, SharedStore] = WeakValueDictionary()
#: Reentrant: a signal's handler may take a lock while the first one is being made.
_making = Mutex(threading.RLock)


def shared_by(client: Redis | RedisCluster) -> SharedStore:
    """What the locks of this client, and of others that connect in the same way, share.

    Raises:
        TypeError: such a client cannot be used here.
    """
    if (latest := _latest((getattr(client, "connection_pool", None),), "server")) is not None:
        return latest
    if isinstance(client, RedisCluster):
        nodes, start, options = nodes_of(client)
        config = "cluster", frozenset(start), _frozen(options)
        return _shared_store(nodes, config, lambda: RedisStore(_cluster(start, options), "the cluster"))
    pool = _pool_of(client)

    def open_store() -> Store:
        server = Server(pool)
        return RedisStore(server, str(server))

    shared = _shared_store(pool, ("server", _config(pool)), open_store)
    _remember([pool], "server", shared)
    return shared


def shared_by_each(clients: Sequence[Redis], restart_delay: bool, check: Callable[[], None]) -> SharedStore:
    """What the Redlocks of these clients share; see `shared_by`.

    Args:
        clients: the nodes' clients.
        restart_delay: see `Redlock`.
        check: called if these clients have made no lock before; raises if they must not.
    """
    way = "redlock", restart_delay
    if (latest := _latest([getattr(client, "connection_pool", None) for client in clients], way)) is not None:
        return latest
    check()
    pools = [_pool_of(client) for client in clients]

    def open_store() -> Store:
        servers = [Server(pool) for pool in pools]
        return RedlockStore(servers, ";".join(map(str, servers)), memory=_MEMORY if restart_delay else None)

    shared = _shared_store(pools[0], (*way, *map(_config, pools)), open_store)
    _remember(pools, way, shared)
    return shared


def address_of(client: Redis) -> str:
    """The server of a client, whatever the database; also readable for people.

    Raises:
        TypeError: such a client cannot be used here.
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
        "; for one of redis.asyncio, make a client of redis.Redis and a lock with thread_local=False, and call it in "
        "threads (asyncio.to_thread)"
        if kind.startswith("redis.asyncio.")
        else ""
    )
    raise TypeError(f"a lock's client is {kind}; allowed: redis.Redis or redis.RedisCluster{asynchronous}")


def _latest(pools: Sequence[object], way: object) -> SharedStore | None:
    """What the last lock of these pools got, for the next one: a program may make a new lock object each time."""
    latest: _Latest | None = getattr(pools[0], _LATEST, None)
    if latest is None or latest.way != way or len(latest.pools) != len(pools):
        return None
    return latest.shared if all(map(_Connects.is_that_of, latest.pools, pools)) else None


def _remember(pools: Sequence[ConnectionPool], way: object, shared: SharedStore) -> None:
    """Have `_latest` find the shared store, if later changes of the pools would be noticed."""
    for pool in pools:
        counts = [value for name, value in pool.connection_kwargs.items() if name not in _INDIFFERENT]
        # A Sentinel's pool may find its master elsewhere; an option that is changed in place equals itself.
        if isinstance(pool, SentinelConnectionPool) or any(isinstance(value, (Mapping, list)) for value in counts):
            return
    attributes_of(pools[0])[_LATEST] = _Latest(way, [_Connects.of(pool) for pool in pools], shared)


def _shared_store(of: object, config: object, open_store: Callable[[], Store]) -> SharedStore:
    with _making.lock:
        shared = _shared_stores.get(config)
        if shared is None:
            shared = _shared_stores.setdefault(config, SharedStore(open_store()))
        # It hangs on the pool itself: a weak dictionary here would keep alive what its values refer to.
        attributes_of(of).setdefault(_ATTRIBUTE, {})[config] = shared
        return shared


def _cluster(start: Sequence[tuple[str, int]], given: Mapping[str, Any]) -> Cluster:
    left_out = {"host", "port", *OF_A_POOL}
    options = {name: value for name, value in given.items() if name not in left_out}

    def pool_of(host: str, port: int) -> ConnectionPool:
        return ConnectionPool(host=host, port=port, **options)

    return Cluster(start, pool_of)


def _config(pool: ConnectionPool) -> object:
    """How the pool connects, as a value that can be compared with another pool's."""
    options = pool.connection_class, _frozen(pool.connection_kwargs)
    if isinstance(pool, SentinelConnectionPool):
        sentinels = tuple(_config(one.connection_pool) for one in sentinels_of(pool))
        return *options, pool.service_name, pool.is_master, _sentinels(pool), sentinels
    return options


def _sentinels(pool: SentinelConnectionPool) -> str:
    return ",".join(str(Server(one.connection_pool)) for one in sentinels_of(pool))


def _frozen(options: Mapping[str, Any]) -> object:
    return frozenset((name, _compared(value)) for name, value in options.items() if name not in _INDIFFERENT)


def _compared(value: Any) -> object:
    if value is None or isinstance(value, (str, bytes, int, float, type)):
        return type(value), value
    if isinstance(value, Mapping):
        return frozenset((name, _compared(it)) for name, it in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_compared, value))
    # Anything else equals only itself; it lives at least as long as the store that was made with it.
    return "object", id(value)
