"""SET NX EX, and DEL: atomic to take, in whole seconds, and anybody's to free."""

from __future__ import annotations

from collections.abc import Sequence

from redis import Redis


class SetExDel:
    """A key with a time to live."""

    def __init__(self, clients: Sequence[Redis], name: str, ttl: float) -> None:
        self._client, self._name, self._ttl = clients[0], name, ttl

    def acquire(self) -> bool:
        return bool(self._client.set(self._name, "locked", nx=True, ex=max(round(self._ttl), 1)))

    def release(self) -> object:
        return self._client.delete(self._name)
