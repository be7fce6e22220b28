"""INCR counts who came; the first one has the lock. Seen wherever INCR is taught as the atomic command."""

from __future__ import annotations

from collections.abc import Sequence

from redis import Redis


class Incr:
    """A counter: 1 is the holder."""

    def __init__(self, clients: Sequence[Redis], name: str, ttl: float) -> None:
        self._client, self._name, self._ttl = clients[0], name, ttl

    def acquire(self) -> bool:
        if self._client.incr(self._name) != 1:
            return False
        self._client.expire(self._name, max(round(self._ttl), 1))
        return True

    def release(self) -> object:
        return self._client.delete(self._name)
