"""Redlock, line by line as the Redis documentation has it: one node after the other.

https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress

from redis import Redis
from redis.exceptions import RedisError

from benchmarks.schemes.set_px_lua import COMPARE_AND_DELETE


class Redlock:
    """A token on a majority of nodes."""

    def __init__(self, clients: Sequence[Redis], name: str, ttl: float) -> None:
        self._clients, self._name, self._ttl = clients, name, ttl
        self._token = secrets.token_bytes(16)

    def acquire(self) -> bool:
        started, granted = time.monotonic(), 0
        for client in self._clients:
            with suppress(RedisError):
                granted += bool(client.set(self._name, self._token, nx=True, px=round(self._ttl * 1000)))
        validity = self._ttl - (time.monotonic() - started) - self._ttl * 0.01 - 0.002
        if granted > len(self._clients) // 2 and validity > 0:
            return True
        self.release()
        return False

    def release(self) -> object:
        freed = 0
        for client in self._clients:
            with suppress(RedisError):
                freed += int(client.eval(COMPARE_AND_DELETE, 1, self._name, self._token))
        return freed > len(self._clients) // 2
