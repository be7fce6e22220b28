"""The ways to lock with Redis that textbooks and forums suggest, each as it is usually written.

They are here to be raced (`python -m benchmarks.race`) and timed, not to be used. A scheme makes a lock from clients
(one, or one for each node), a name and a ttl in seconds.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from redis import Redis
from redis.exceptions import NoScriptError, RedisError, WatchError

from celery_singleton_lock import Lock as OurLock


class Lock(Protocol):
    """One holder's view of one lock."""

    def acquire(self, wait: float = 0.0) -> bool:
        """Take it, waiting for up to `wait` seconds; 0: try once."""

    def release(self) -> object:
        """Give it back. A holder learns of a loss only from the return value or the exception."""


Scheme = Callable[[Sequence[Redis], str, float], Lock]

COMPARE_AND_DELETE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"

_SHA = hashlib.sha1(COMPARE_AND_DELETE.encode(), usedforsecurity=False).hexdigest()


def _watch(client: Redis, name: str, token: str) -> bool:
    with client.pipeline() as pipe, suppress(WatchError):
        pipe.watch(name)
        if pipe.get(name) == token.encode():
            pipe.multi()
            pipe.delete(name)
            pipe.execute()
            return True
    return False


def _eval(client: Redis, name: str, token: str) -> bool:
    return bool(client.eval(COMPARE_AND_DELETE, 1, name, token))


def _evalsha(client: Redis, name: str, token: str) -> bool:
    try:
        return bool(client.evalsha(_SHA, 1, name, token))
    except NoScriptError:
        return _eval(client, name, token)


def _whole(ttl: float) -> int:
    return max(round(ttl), 1)


#: Ways to take a key, for that many seconds.
TAKE: Mapping[str, Callable[[Redis, str, str, float], object]] = {
    # Counts the callers; the first one has the lock. Common wherever INCR is taught as the atomic command.
    "INCR + EXPIRE": lambda client, name, token, ttl: client.incr(name) == 1 and client.expire(name, _whole(ttl)),
    # The first recipe of many books, without an expiry: a waiter gives up after a while.
    "SETNX": lambda client, name, token, ttl: client.setnx(name, token),
    # The usual way before SET could do both; it is still copied.
    "SETNX + EXPIRE": lambda client, name, token, ttl: client.setnx(name, token) and client.expire(name, _whole(ttl)),
    # Atomic, in whole seconds.
    "SET NX EX": lambda client, name, token, ttl: client.set(name, token, nx=True, ex=_whole(ttl)),
    # The single-server lock of the Redis documentation.
    "SET NX PX": lambda client, name, token, ttl: client.set(name, token, nx=True, px=round(ttl * 1000)),
}

#: Ways to free it: whatever its value, or compared with the token.
FREE: Mapping[str, Callable[[Redis, str, str], object]] = {
    "DEL": lambda client, name, token: client.delete(name),
    "WATCH/MULTI": _watch,
    "EVAL": _eval,
    "EVALSHA": _evalsha,
}


class OneKey:
    """A key on the first server. A waiter looks every 0.1 s."""

    def __init__(self, take: str, free: str, clients: Sequence[Redis], name: str, ttl: float) -> None:
        self._take, self._free = TAKE[take], FREE[free]
        self._clients, self._name, self._ttl, self._token = clients, name, ttl, ""

    def acquire(self, wait: float = 0.0) -> bool:
        until = time.monotonic() + wait
        while not self._tried():
            if time.monotonic() >= until:
                return False
            time.sleep(0.1)
        return True

    def release(self) -> object:
        return self._free(self._clients[0], self._name, self._token)

    def _tried(self) -> bool:
        self._token = secrets.token_hex(16)
        return bool(self._take(self._clients[0], self._name, self._token, self._ttl))


class Redlock(OneKey):
    """Redlock, line by line as the Redis documentation has it: one node after the other.

    https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/
    """

    def __init__(self, clients: Sequence[Redis], name: str, ttl: float) -> None:
        super().__init__("SET NX PX", "EVAL", clients, name, ttl)

    def release(self) -> object:
        freed = 0
        for client in self._clients:
            with suppress(RedisError):
                freed += bool(self._free(client, self._name, self._token))
        return freed > len(self._clients) // 2

    def _tried(self) -> bool:
        started, granted, self._token = time.monotonic(), 0, secrets.token_hex(16)
        for client in self._clients:
            with suppress(RedisError):
                granted += bool(self._take(client, self._name, self._token, self._ttl))
        validity = self._ttl - (time.monotonic() - started) - self._ttl * 0.01 - 0.002
        if granted > len(self._clients) // 2 and validity > 0:
            return True
        self.release()
        return False


class Ours:
    """A lock with the interface of redis-py's, such as `celery_singleton_lock.Lock`."""

    def __init__(self, lock: OurLock) -> None:
        self._lock, self.release = lock, lock.release

    def acquire(self, wait: float = 0.0) -> bool:
        return bool(self._lock.acquire(blocking=wait > 0, blocking_timeout=wait or None))

    @property
    def fence(self) -> int:
        return self._lock.fence


def one_key(take: str, free: str) -> Scheme:
    return lambda clients, name, ttl: OneKey(take, free, clients, name, ttl)


def ours(clients: Sequence[Redis], name: str, ttl: float) -> Lock:
    """`Lock`, on the first server: the only scheme here that renews while it holds."""
    return Ours(OurLock(clients[0], name, timeout=ttl))


#: By the name that the race's table shows.
SCHEMES: Mapping[str, Scheme] = {
    "`Lock`": ours,
    "INCR + EXPIRE": one_key("INCR + EXPIRE", "DEL"),
    "SETNX, acquire time-out": one_key("SETNX", "DEL"),
    "SETNX + EXPIRE": one_key("SETNX + EXPIRE", "DEL"),
    "SET NX EX + DEL": one_key("SET NX EX", "DEL"),
    "SET NX PX + DEL": one_key("SET NX PX", "DEL"),
    "SET NX PX + WATCH/MULTI": one_key("SET NX PX", "WATCH/MULTI"),
    "SET NX PX + Lua": one_key("SET NX PX", "EVAL"),
    "Redlock by the book": Redlock,
}
