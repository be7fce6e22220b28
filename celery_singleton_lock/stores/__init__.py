"""Where locks are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery_singleton_lock.backend import shown
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.options.options import Settings
from celery_singleton_lock.stores.base import Bell, Held, LockRequest, LockStore, Record, Reservation, Waiter
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.store import Store

if TYPE_CHECKING:
    from celery_singleton_lock.stores.redis.redlock import RedlockStore
    from celery_singleton_lock.stores.redis.store import RedisStore

__all__ = [
    "Bell",
    "Held",
    "LockRequest",
    "LockStore",
    "Record",
    "Reservation",
    "Store",
    "Waiter",
    "open_store",
    "open_url",
]

_IN_THIS_PROCESS = MemoryStore()


def open_store(settings: Settings) -> Store:
    """The store that the settings name; nothing is connected to until it is used.

    Raises:
        InvalidOption: the backend's URL or a transport option is wrong.
    """
    if settings.backend.startswith("memory://"):
        return _IN_THIS_PROCESS
    return open_url(settings.backend, settings.transport_options, replicas=settings.replicas, prefix=settings.prefix)


def open_url(
    url: str, options: Mapping[str, Any] | None = None, *, replicas: int = 0, prefix: str = "singleton_lock"
) -> RedisStore | RedlockStore:
    """The store at a URL as for `singleton_lock_backend`, other than `memory://`.

    Args:
        url: one server, Sentinels, a cluster, or the nodes of a Redlock.
        options: as for `singleton_lock_transport_options`.
        replicas: how many replicas must have a lock before it counts as taken.
        prefix: of the key by which a node of a Redlock knows since when it remembers.

    Raises:
        InvalidOption: the URL or an option is wrong.
    """
    # Imported here: `memory://` needs no Redis client.
    from celery_singleton_lock.stores.redis import address
    from celery_singleton_lock.stores.redis.cluster import Cluster
    from celery_singleton_lock.stores.redis.redlock import RedlockStore
    from celery_singleton_lock.stores.redis.server import Server
    from celery_singleton_lock.stores.redis.store import RedisStore

    options, name, scheme = dict(options or {}), shown(url), url.partition("://")[0].lower()
    delay = options.pop("restart_delay", True)
    if scheme == "sentinel":
        return RedisStore(Server(address.of_sentinels(url, options, name)), name, replicas=replicas)
    if scheme.endswith("+cluster"):
        return RedisStore(Cluster(*address.of_cluster(url, options, name)), name, replicas=replicas)
    if ";" not in url:
        return RedisStore(Server(address.of_server(url, options, name)), name, replicas=replicas)
    if replicas:
        raise InvalidOption(
            f"setting singleton_lock_replicas is {replicas}, and singleton_lock_backend {name!r} has several servers "
            "that are no replicas of each other (Redlock); allowed there: 0"
        )
    nodes = [Server(address.of_server(each, options, name)) for each in url.split(";")]
    return RedlockStore(nodes, name, memory=f"{prefix}:memory" if delay else None)
