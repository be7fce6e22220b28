"""SET NX PX, and DEL: as with EX, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

from redis import Redis


class SetPxDel:
    """A key with a time to live."""

    def __init__(self, clients: Sequence[Redis], name: str, ttl: float) -> None:
        self._client, self._name, self._ttl = clients[0], name, ttl

    def acquire(self) -> bool:
        return bool(self._client.set(self._name, "locked", nx=True, px=round(self._ttl * 1000)))

    def release(self) -> object:
        return self._client.delete(self._name)
