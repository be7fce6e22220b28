"""The other locks for Python that are installed by `make bench`, and the usual ways without a library."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pottery
import redis_lock
import redlock
from redis import Redis, WatchError
from redis.backoff import NoBackoff
from redis.lock import Lock as RedisPyLock
from redis.retry import Retry

from benchmarks.locks import TTL, Maker, Opener

COMPARE_AND_DELETE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"

#: What the Redlocks of others are given for a client: redis-py's own patience would be minutes.
TUNED: Mapping[str, Any] = {"socket_timeout": 0.1, "socket_connect_timeout": 0.1}

#: What who waits by BLPOP must set: with redis-py 8's 5 s, a longer wait ends in a TimeoutError.
PATIENT: Mapping[str, Any] = {"socket_timeout": None}

_MS = int(TTL * 1000)


class _Functions:
    """A lock of two functions; the second gets what the first returned, which is false if the lock was taken."""

    def __init__(self, acquire: Callable[[float], Any], release: Callable[[Any], object]) -> None:
        self._acquire, self._release = acquire, release
        self._token: Any = None

    def acquire(self, wait: float) -> bool:
        self._token = self._acquire(wait)
        return bool(self._token)

    def release(self) -> None:
        self._release(self._token)


def bare(urls: Sequence[str]) -> Maker:
    """`SET NX PX` and a compare-and-delete by `EVALSHA`, through redis-py: the least that is a lock."""
    client = Redis.from_url(urls[0])
    sha = client.script_load(COMPARE_AND_DELETE)

    def make(name: str) -> _Functions:
        def acquire(wait: float) -> str | None:
            token = secrets.token_hex(16)
            return token if client.set(name, token, nx=True, px=_MS) else None

        return _Functions(acquire, lambda token: client.evalsha(sha, 1, name, token))

    return make


def list_token(urls: Sequence[str]) -> Maker:
    """One token in a list, taken by BLPOP: not a lock (it ends with its holder), but the least that a wake-up costs."""
    client = Redis.from_url(urls[0], **PATIENT)
    known: set[str] = set()

    def make(name: str) -> _Functions:
        if name not in known and client.set(f"{name}:made", 1, nx=True):
            client.rpush(name, 1)
        known.add(name)
        return _Functions(lambda wait: client.blpop([name], wait), lambda token: client.rpush(name, 1))

    return make


def redis_py(urls: Sequence[str]) -> Maker:
    """redis-py's own lock."""
    client = Redis.from_url(urls[0])

    def make(name: str) -> _Functions:
        lock = RedisPyLock(client, name, timeout=TTL)
        return _Functions(
            lambda wait: lock.acquire(blocking=wait > 0, blocking_timeout=wait or None), lambda token: lock.release()
        )

    return make


def python_redis_lock(urls: Sequence[str]) -> Maker:
    """python-redis-lock."""
    client = Redis.from_url(urls[0], **PATIENT)

    def make(name: str) -> _Functions:
        lock = redis_lock.Lock(client, name, expire=int(TTL))
        return _Functions(
            lambda wait: lock.acquire(blocking=wait > 0, timeout=wait or None), lambda token: lock.release()
        )

    return make


def pottery_redlock(urls: Sequence[str]) -> Maker:
    """pottery's Redlock over these servers."""
    clients = frozenset(tuned_clients(urls) if len(urls) > 1 else [Redis.from_url(urls[0])])

    def make(name: str) -> _Functions:
        lock = pottery.Redlock(key=name, masters=clients, auto_release_time=TTL)
        return _Functions(
            lambda wait: lock.acquire(blocking=wait > 0, timeout=wait or -1), lambda token: lock.release()
        )

    return make


def redlock_py(urls: Sequence[str]) -> Maker:
    """redlock-py over these servers; one try."""
    clients = tuned_clients(urls) if len(urls) > 1 else [Redis.from_url(urls[0])]
    # It pauses after its last try too; 0 would be taken for "default".
    factory = redlock.Redlock(clients, retry_count=1, retry_delay=0.0001)
    return lambda name: _Functions(lambda wait: factory.lock(name, _MS), factory.unlock)


def tuned_clients(urls: Sequence[str]) -> list[Redis]:
    """Clients that give up a silent server soon, and do not repeat what failed."""
    return [Redis.from_url(url, **TUNED, retry=Retry(NoBackoff(), 0)) for url in urls]


def incr_expire(urls: Sequence[str]) -> Maker:
    """INCR, EXPIRE, DEL: no owner, and no end if the process dies between the first two."""
    client = Redis.from_url(urls[0])

    def make(name: str) -> _Functions:
        def acquire(wait: float) -> bool:
            return client.incr(name) == 1 and bool(client.expire(name, int(TTL)))

        return _Functions(acquire, lambda token: client.delete(name))

    return make


def setnx_watch(urls: Sequence[str]) -> Maker:
    """SETNX, EXPIRE; WATCH, GET, MULTI, DEL, EXEC."""
    client = Redis.from_url(urls[0])

    def make(name: str) -> _Functions:
        def acquire(wait: float) -> str | None:
            token = secrets.token_hex(16)
            return token if client.setnx(name, token) and client.expire(name, int(TTL)) else None

        def release(token: str) -> None:
            with client.pipeline() as pipeline:
                try:
                    pipeline.watch(name)
                    if pipeline.get(name) == token.encode():
                        pipeline.multi()
                        pipeline.delete(name)
                        pipeline.execute()
                except WatchError:
                    return

        return _Functions(acquire, release)

    return make


def set_nx_delete(urls: Sequence[str]) -> Maker:
    """SET NX EX, and DEL whoever holds it."""
    client = Redis.from_url(urls[0])
    return lambda name: _Functions(
        lambda wait: client.set(name, 1, nx=True, ex=int(TTL)), lambda token: client.delete(name)
    )


def set_nx_eval(urls: Sequence[str]) -> Maker:
    """SET NX PX, and a compare-and-delete whose text is sent each time."""
    client = Redis.from_url(urls[0])

    def make(name: str) -> _Functions:
        def acquire(wait: float) -> str | None:
            token = secrets.token_hex(16)
            return token if client.set(name, token, nx=True, px=_MS) else None

        return _Functions(acquire, lambda token: client.eval(COMPARE_AND_DELETE, 1, name, token))

    return make


TEXTBOOK: Mapping[str, Opener] = {
    "INCR + EXPIRE + DEL": incr_expire,
    "SETNX + EXPIRE + WATCH/MULTI/DEL": setnx_watch,
    "SET NX EX + DEL": set_nx_delete,
    "SET NX PX + EVAL": set_nx_eval,
}


def hold_renewed(url: str, count: int) -> Callable[[], int]:
    """Hold `count` of python-redis-lock with `auto_renewal`. Returns how many are still renewed when asked."""
    # Its threads would not get by with the 100 connections that redis-py allows.
    client = Redis.from_url(url, max_connections=4000)
    locks = [redis_lock.Lock(client, str(number), expire=int(TTL), auto_renewal=True) for number in range(count)]
    for lock in locks:
        assert lock.acquire(blocking=False)
    return lambda: sum(lock._lock_renewal_thread.is_alive() for lock in locks)


def hold_nothing(url: str, count: int) -> Callable[[], int]:
    """Do nothing, with a thread that sleeps: what a process costs by itself."""
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    return lambda: 0
