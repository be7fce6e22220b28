"""SETNX, then EXPIRE: what was done before SET took both, and is still copied."""

from __future__ import annotations

from collections.abc import Sequence

from redis import Redis


class SetNxExpire:
    """A key with a time to live that is given to it a moment later."""

    def __init__(self, clients: Sequence[Redis], name: str, ttl: float) -> None:
        self._client, self._name, self._ttl = clients[0], name, ttl

    def acquire(self) -> bool:
        if not self._client.setnx(self._name, "locked"):
            return False
        self._client.expire(self._name, max(round(self._ttl), 1))
        return True

    def release(self) -> object:
        return self._client.delete(self._name)
