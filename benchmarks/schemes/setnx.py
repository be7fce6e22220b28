"""SETNX, and whoever waits gives up after a while: the first recipe of many books, without an expiry."""

from __future__ import annotations

from collections.abc import Sequence

from redis import Redis


class SetNx:
    """A key that exists while somebody holds the lock."""

    def __init__(self, clients: Sequence[Redis], name: str, ttl: float) -> None:
        self._client, self._name = clients[0], name

    def acquire(self) -> bool:
        return bool(self._client.setnx(self._name, "locked"))

    def release(self) -> object:
        return self._client.delete(self._name)
