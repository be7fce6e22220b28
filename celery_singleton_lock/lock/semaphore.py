"""A lock outside of tasks that several can hold at once."""

from __future__ import annotations

from typing import Any

from redis import Redis
from redis.cluster import RedisCluster

from celery_singleton_lock.lock.lock import Lock


class Semaphore(Lock):
    """A lock that up to `limit` holders share, each with its own object (or thread); see `Lock`.

    Args:
        limit: how many holders; the same for all users of the name.

    Raises:
        ValueError: the limit is less than one, or the timeout is too short.
    """

    def __init__(self, redis: Redis | RedisCluster, name: str | bytes, limit: int, **options: Any) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"limit of semaphore {name!r} is {limit!r}; allowed: a whole number, 1 or more")
        super().__init__(redis, name, **options)
        self._limit = limit
