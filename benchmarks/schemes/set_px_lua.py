"""SET NX PX with a token, freed by a script that compares it: the single-server lock of the Redis documentation.

https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from redis import Redis

COMPARE_AND_DELETE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class SetPxLua:
    """A key with a time to live, and a token in it."""

    def __init__(self, clients: Sequence[Redis], name: str, ttl: float) -> None:
        self._client, self._name, self._ttl = clients[0], name, ttl
        self._token = secrets.token_bytes(16)

    def acquire(self) -> bool:
        return bool(self._client.set(self._name, self._token, nx=True, px=round(self._ttl * 1000)))

    def release(self) -> object:
        return bool(self._client.eval(COMPARE_AND_DELETE, 1, self._name, self._token))
