"""The locks that are timed: those of other libraries, locks by hand, and this package's, for programs and for tasks.

A contestant is opened with the URLs of its servers (one, or several for a Redlock), and then makes a lock for each
name, on connections that stay open.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import pottery
import redis_lock
import redlock
from redis import Redis
from redis.backoff import NoBackoff
from redis.connection import Connection
from redis.lock import Lock as RedisPyLock
from redis.retry import Retry

from benchmarks.measure import OWN
from benchmarks.schemes import COMPARE_AND_DELETE, Lock, Ours, Scheme, one_key, ours
from celery_singleton_lock import Redlock, clock, process_identity
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import Held, LockRequest, Record
from celery_singleton_lock.stores.store import Store

#: Seconds that every lock here lasts.
TTL = 30.0

#: Seconds after which the other Redlocks give up a silent server: by default redis-py would wait for minutes.
GIVE_UP = 0.1

Maker = Callable[[str], Lock]
Opener = Callable[[Sequence[str]], Maker]


def opened(scheme: Scheme, **options: Any) -> Opener:
    """The contestant with this way to lock; `options` are those of its clients."""

    def opener(urls: Sequence[str]) -> Maker:
        clients = [Redis.from_url(url, **options) for url in urls]
        return lambda name: scheme(clients, name, TTL)

    return opener


class _Functions:
    """A lock made of two functions; the second gets what the first returned, which is false if the lock was taken."""

    def __init__(self, acquire: Callable[[float], Any], release: Callable[[Any], object]) -> None:
        self._acquire, self._release = acquire, release

    def acquire(self, wait: float = 0.0) -> bool:
        self._token = self._acquire(wait)
        return bool(self._token)

    def release(self) -> object:
        return self._release(self._token)


def _of_library(make: Callable[[Sequence[Redis], str, float], Any], timeout: str, no_wait: float | None) -> Scheme:
    """Locks whose `acquire` takes `blocking`, and a time to wait under this name."""

    def scheme(clients: Sequence[Redis], name: str, ttl: float) -> Lock:
        lock = make(clients, name, ttl)
        return _Functions(
            lambda wait: lock.acquire(blocking=wait > 0, **{timeout: wait or no_wait}), lambda _: lock.release()
        )

    return scheme


_redis_py = _of_library(lambda of, name, ttl: RedisPyLock(of[0], name, timeout=ttl), "blocking_timeout", None)
_waking = _of_library(lambda of, name, ttl: redis_lock.Lock(of[0], name, expire=int(ttl)), "timeout", None)
_pottery = _of_library(
    lambda of, name, ttl: pottery.Redlock(key=name, masters=frozenset(of), auto_release_time=ttl), "timeout", -1
)


def _redlock_py(clients: Sequence[Redis], name: str, ttl: float) -> Lock:
    # It also pauses after its last try; 0 would be taken for "default".
    made = redlock.Redlock(clients, retry_count=1, retry_delay=0.0001)
    return _Functions(lambda wait: made.lock(name, int(ttl * 1000)), made.unlock)


def _our_redlock(clients: Sequence[Redis], name: str, ttl: float) -> Lock:
    # The nodes were started a moment ago, and would have no vote for one ttl.
    return Ours(Redlock(clients, name, timeout=ttl, restart_delay=False))


def _list_token(clients: Sequence[Redis], name: str, ttl: float) -> Lock:
    """One token in a list, taken by BLPOP: not a lock (it ends with its holder), but the least that a wake-up costs."""
    client = clients[0]
    if client.set(f"{name}:made", 1, nx=True):
        client.rpush(name, 1)
    return _Functions(lambda wait: client.blpop([name], wait), lambda _: client.rpush(name, 1))


class _OverSocket:
    """The bare lock, as bytes that are prepared once: what two round trips cost without any library."""

    def __init__(self, server: socket.socket, take: bytes, free: bytes) -> None:
        self._server, self._take, self._free, self._token = server, take, free, b""

    def acquire(self, wait: float = 0.0) -> bool:
        self._token = secrets.token_hex(16).encode()
        return self._answer(self._take) == b"+OK\r\n"

    def release(self) -> object:
        return self._answer(self._free) == b":1\r\n"

    def _answer(self, command: bytes) -> bytes:
        self._server.sendall(command % self._token)
        return self._server.recv(1024)


def _over_socket(urls: Sequence[str]) -> Maker:
    at = urlsplit(urls[0])
    assert at.hostname is not None
    assert at.port is not None
    server = socket.create_connection((at.hostname, at.port))
    server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    packer = Connection()
    with Redis.from_url(urls[0]) as client:
        digest = client.script_load(COMPARE_AND_DELETE)

    @cache
    def commands(name: str) -> tuple[bytes, bytes]:
        no_token = "%b".ljust(32)  # As long as a token, because the length comes first.
        take = ("SET", name, no_token, "NX", "PX", round(TTL * 1000))
        free = ("EVALSHA", digest, 1, name, no_token)
        packed = (b"".join(packer.pack_command(*command)) for command in (take, free))
        take_bytes, free_bytes = (each.replace(no_token.encode(), b"%b") for each in packed)
        return take_bytes, free_bytes

    return lambda name: _OverSocket(server, *commands(name))


class _OfTask:
    """A lock as a task takes it: each message has another id, an owner and a holder, and leaves a record."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, f"bench:{{{key}}}"
        self._holder = Holder(new_owner(), 0, "worker@host", 1, 0.0, process=process_identity.own())
        self._lease: Lease | None = None

    def acquire(self, wait: float = 0.0) -> bool:
        request = LockRequest(self._key, new_owner(), TTL, self._holder, waiting=wait > 0, check_finished=True)
        began = clock.now()
        found = self._store.acquire(request)
        if wait and isinstance(found, Held):
            with self._store.waiter(request) as waiter:
                while isinstance(found, Held) and (left := began + wait - clock.now()) > 0:
                    found = waiter.wait(left)
        self._lease = found if isinstance(found, Lease) else None
        return self._lease is not None

    def release(self) -> object:
        assert self._lease is not None
        record = Record(self._holder.message, b'["SUCCESS", 3600.0, true]\nnull', 60.0)
        return self._store.free(self._lease, record=record)


def _as_task(urls: Sequence[str]) -> Maker:
    store = open_url(urls[0])
    return lambda name: _OfTask(store, name)


BARE, TOKEN, ON_ONE_NODE = "bare SET NX PX + EVALSHA", "bare BLPOP of a token", "bare lock on one server"
OVER_SOCKET = "the same, as prepared bytes over a socket"

_bare = opened(one_key("SET NX PX", "EVALSHA"))
# A client that waits with BLPOP needs this: with the 5 s of redis-py 8, a longer wait ends in a TimeoutError.
_patient = {"socket_timeout": None}
_tuned = {"socket_timeout": GIVE_UP, "socket_connect_timeout": GIVE_UP, "retry": Retry(NoBackoff(), 0)}

#: The locks of the hand-over benchmark, for which one process waits while another holds them.
WAITING: Mapping[str, Opener] = {
    TOKEN: opened(_list_token, **_patient),
    f"{OWN}: as a task locks": _as_task,
    f"{OWN}: Lock": opened(ours),
    "redis-py Lock": opened(_redis_py),
    "python-redis-lock": opened(_waking, **_patient),
}

#: Timed on one server.
ONE_SERVER: Mapping[str, Opener] = {
    BARE: _bare,
    OVER_SOCKET: _over_socket,
    **{name: opener for name, opener in WAITING.items() if name != TOKEN},
    "pottery, 1 master": opened(_pottery),
    "redlock-py, 1 server": opened(_redlock_py),
    "INCR + EXPIRE + DEL": opened(one_key("INCR + EXPIRE", "DEL")),
    "SETNX + EXPIRE + WATCH/MULTI/DEL": opened(one_key("SETNX + EXPIRE", "WATCH/MULTI")),
    "SET NX EX + DEL": opened(one_key("SET NX EX", "DEL")),
    "SET NX PX + EVAL": opened(one_key("SET NX PX", "EVAL")),
}

#: Timed on several servers.
NODES: Mapping[str, Opener] = {
    ON_ONE_NODE: lambda urls: _bare(urls[:1]),
    f"{OWN}: Redlock": opened(_our_redlock),
    "pottery": opened(_pottery, **_tuned),
    "redlock-py": opened(_redlock_py, **_tuned),
}


def is_lock(key: str) -> bool:
    """Whether a key on a server is a lock, and not one of the keys that belong to a lock."""
    return not key.endswith((":fence", ":waiting", ":wake", ":memory")) and ":done:" not in key and ":over:" not in key
