"""SET NX PX with a token, freed by WATCH and MULTI if the token is still there: compare-and-delete without Lua."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from redis import Redis
from redis.exceptions import WatchError


class SetPxWatch:
    """A key with a time to live, and a token in it."""

    def __init__(self, clients: Sequence[Redis], name: str, ttl: float) -> None:
        self._client, self._name, self._ttl = clients[0], name, ttl
        self._token = secrets.token_bytes(16)

    def acquire(self) -> bool:
        return bool(self._client.set(self._name, self._token, nx=True, px=round(self._ttl * 1000)))

    def release(self) -> object:
        with self._client.pipeline() as pipe:
            try:
                pipe.watch(self._name)
                if pipe.get(self._name) != self._token:
                    return False
                pipe.multi()
                pipe.delete(self._name)
                pipe.execute()
                return True
            except WatchError:
                return False
