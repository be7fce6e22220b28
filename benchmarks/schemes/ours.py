"""Ours, on one server. The only scheme here that renews while it holds."""

from __future__ import annotations

from collections.abc import Sequence

from redis import Redis

from celery_singleton_lock import Lock


class Ours:
    """`celery_singleton_lock.Lock`."""

    def __init__(self, clients: Sequence[Redis], name: str, ttl: float) -> None:
        self._lock = Lock(clients[0], name, timeout=ttl)

    def acquire(self) -> bool:
        return self._lock.acquire(blocking=False)

    def release(self) -> object:
        return self._lock.release()

    @property
    def fence(self) -> int:
        """Higher for each later holder."""
        return self._lock.fence

    def wait(self, seconds: float) -> bool:
        """Take it within so many seconds."""
        return self._lock.acquire(blocking_timeout=seconds)
