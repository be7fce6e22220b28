"""The servers that URLs name, and how redis-py connects to them. Nothing is connected to here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from redis.backoff import NoBackoff
from redis.connection import ConnectionPool, parse_url
from redis.exceptions import RedisError
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from celery_singleton_lock import cleaned
from celery_singleton_lock.backend import Backend, Kind
from celery_singleton_lock.errors import InvalidOption
from celery_singleton_lock.stores.redis.cluster import Cluster, PoolOf
from celery_singleton_lock.stores.redis.server import Server

#: Options for finding the master, and of a Redlock, which are not options of the connection to the master.
_OF_OTHERS = ("master_name", "min_other_sentinels", "sentinel_kwargs", "restart_delay")

#: Seconds that one Sentinel may take to say who the master is.
_SENTINEL_TIMEOUT = 0.5

_SENTINEL_PORT, _REDIS_PORT = 26379, 6379


def opened(backend: Backend, options: Mapping[str, Any]) -> Cluster | list[Server]:
    """The cluster, or each server, that a backend other than `memory://` names.

    Raises:
        InvalidOption: the URL or an option is not one that redis-py knows.
    """
    others = {name: value for name, value in options.items() if name != "restart_delay"}
    if backend.kind is Kind.CLUSTER:
        return Cluster(*_of_cluster(backend, others))
    if backend.kind is Kind.SENTINEL:
        return [Server(of_sentinels(backend, others))]
    return [Server(_checked(partial(_pool, url, others), backend, others)) for url in backend.urls]


def of_sentinels(backend: Backend, options: Mapping[str, Any]) -> ConnectionPool:
    """The master that Sentinels know by the option `master_name`: `sentinel://a:26379;sentinel://b:26379`.

    User, password and database in the first URL are the master's, as with kombu; `sentinel_kwargs` has the Sentinels'.

    Raises:
        InvalidOption: the URL or an option is not one that redis-py knows, or there is no `master_name`.
    """
    if not options.get("master_name"):
        raise InvalidOption(
            "setting singleton_lock_transport_options has no 'master_name', which singleton_lock_backend "
            f"{backend.masked!r} needs: set it to the name under which the Sentinels know the master, such as "
            "{'master_name': 'mymaster'}"
        )
    return _checked(lambda: _sentinel_pool(backend.urls, options), backend, options)


def _of_cluster(backend: Backend, options: Mapping[str, Any]) -> tuple[Sequence[tuple[str, int]], PoolOf]:
    """Nodes of a cluster to begin with, and how to connect to any: `redis+cluster://a:6379;redis+cluster://b:6379`.

    Raises:
        InvalidOption: the URL or an option is not one that redis-py knows.
    """
    addresses: list[tuple[str, int]] = []
    common: dict[str, Any] = {}

    def pool_of(host: str, port: int) -> ConnectionPool:
        return ConnectionPool(host=host, port=port, **common)

    def first() -> ConnectionPool:
        each = [_as_redis_py_spells(url.replace("+cluster", "", 1)) for url in backend.urls]
        addresses.extend(_address(url, _REDIS_PORT) for url in each)
        if any(urlsplit(url).path.strip("/") not in ("", "0") for url in each):
            raise ValueError("a cluster has database 0 only")
        merged = {**dict(parse_url(each[0])), **options}  # type: ignore[no-untyped-call]
        common.update({name: value for name, value in merged.items() if name not in ("host", "port", "db")})
        return pool_of(*addresses[0])

    _checked(first, backend, options)
    return addresses, pool_of


def _pool(url: str, options: Mapping[str, Any]) -> ConnectionPool:
    from_url: dict[str, Any] = dict(parse_url(_as_redis_py_spells(url)))  # type: ignore[no-untyped-call]
    return ConnectionPool(**{**from_url, **options})


def _sentinel_pool(urls: Sequence[str], options: Mapping[str, Any]) -> ConnectionPool:
    common: dict[str, Any] = dict(parse_url(_as_redis_py_spells(urls[0].replace("sentinel", "redis", 1))))  # type: ignore[no-untyped-call]
    common.pop("host", None)
    common.pop("port", None)
    common.update({name: value for name, value in options.items() if name not in _OF_OTHERS})
    if any(name.startswith("ssl") for name in common):
        common["ssl"] = True
    limits = {
        "socket_timeout": _SENTINEL_TIMEOUT,
        "socket_connect_timeout": _SENTINEL_TIMEOUT,
        "retry": Retry(NoBackoff(), 0),  # The next Sentinel is asked instead.
    }
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        [_address(url, _SENTINEL_PORT) for url in urls],
        min_other_sentinels=options.get("min_other_sentinels", 0),
        sentinel_kwargs={**limits, **(options.get("sentinel_kwargs") or {})},
    )
    return SentinelConnectionPool(options["master_name"], sentinel, **common)  # type: ignore[no-untyped-call]


def _address(url: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "localhost", parts.port or default_port


def _checked(make: Callable[[], ConnectionPool], backend: Backend, options: Mapping[str, Any]) -> ConnectionPool:
    """The pool, if redis-py can make a connection from it."""
    try:
        pool = make()
        Server(pool).undialed()
    except (ValueError, TypeError, AttributeError, OverflowError, RedisError) as error:
        # The error may repeat what follows a `?`: in a mistyped URL, that may be a part of the password.
        has_query = any("?" in url for url in backend.urls)
        why = f"{type(error).__name__} for the URL, or what follows its ?" if has_query else cleaned.text(str(error))
        raise InvalidOption(
            f"setting singleton_lock_backend is {backend.masked!r}, with the transport options "
            f"{sorted(map(str, options))}: {why}; allowed: what redis-py's connections take"
        ) from None
    return pool


def _as_redis_py_spells(url: str) -> str:
    """kombu's spellings of a Redis URL, in redis-py's."""
    scheme, netloc, path, query, _ = urlsplit(url)
    given = dict(parse_qsl(query))
    if scheme in ("redis", "rediss") and not path.strip("/").isdigit() and path.strip("/"):
        raise ValueError("the database, behind the host and a slash, is not a number")
    if scheme == "redis+socket":
        scheme = "unix"
    if "virtual_host" in given:
        given["db"] = given.pop("virtual_host").strip("/")
    if "ssl_cert_reqs" in given:
        given["ssl_cert_reqs"] = given["ssl_cert_reqs"].removeprefix("CERT_").lower()
    return f"{scheme}://{netloc}{path}?{urlencode(given)}"
