"""Where locks are kept.

Begin with `base.py`, what a store is asked, and `store.py`, what it does; `memory` is the shortest store, `redis` the
one for production.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from celery_singleton_lock.backend import Backend, Kind
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.options.app import Settings, parse_backend
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.store import Store

if TYPE_CHECKING:
    from celery_singleton_lock.stores.redis.redlock import RedlockStore
    from celery_singleton_lock.stores.redis.store import RedisStore

__all__ = ["check_servers", "open_store", "open_url"]

_IN_THIS_PROCESS = MemoryStore()


def open_store(settings: Settings) -> Store:
    """The store that the settings name; nothing is connected to until it is used.

    Raises:
        InvalidOption: the backend's URL or a transport option is wrong.
    """
    if settings.backend.in_memory:
        return _IN_THIS_PROCESS
    return _open(settings.backend, settings.transport_options, prefix=settings.prefix)


def check_servers(settings: Settings) -> None:
    """Refuse servers that answer and are of another kind than the settings say; a silent one may be started later.

    Raises:
        InvalidOption: a node of a cluster is taken for a single server.
    """
    if settings.backend.kind not in (Kind.SERVER, Kind.REDLOCK):
        return
    from celery_singleton_lock.stores.redis.probe import Servers
    from celery_singleton_lock.stores.redis.server import NAME_THE_CLUSTER, OF_A_CLUSTER

    servers = Servers(settings)
    found = servers.of_a_cluster()
    servers.close()
    if found:
        raise InvalidOption(
            f"setting singleton_lock_backend is {settings.backend.masked!r}; of {found[0]}: {OF_A_CLUSTER}; "
            f"{NAME_THE_CLUSTER}"
        )


def open_url(
    url: str, options: Mapping[str, Any] | None = None, *, prefix: str = "singleton_lock"
) -> RedisStore | RedlockStore:
    """The store at a URL as for `singleton_lock_backend`, other than `memory://`.

    Args:
        url: one server, Sentinels, a cluster, or the nodes of a Redlock.
        options: as for `singleton_lock_transport_options`.
        prefix: the prefix of the key that says since when a node of a Redlock remembers.

    Raises:
        InvalidOption: the URL or an option is wrong.
    """
    return _open(parse_backend(url), options or {}, prefix=prefix)


def _open(backend: Backend, options: Mapping[str, Any], *, prefix: str) -> RedisStore | RedlockStore:
    # Imported here: `memory://` needs no Redis client.
    from celery_singleton_lock.stores.redis import urls
    from celery_singleton_lock.stores.redis.cluster import Cluster
    from celery_singleton_lock.stores.redis.redlock import RedlockStore
    from celery_singleton_lock.stores.redis.store import RedisStore

    servers = urls.opened(backend, options)
    if isinstance(servers, Cluster):
        return RedisStore(servers, backend.masked)
    if backend.kind is Kind.REDLOCK:
        memory = f"{prefix}:memory" if options.get("restart_delay", True) else None
        return RedlockStore(servers, backend.masked, memory=memory)
    return RedisStore(servers[0], backend.masked)
