"""A contestant: the usual way to lock a task by hand."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

from celery import Task
from redis import Redis


@lru_cache(maxsize=1)
def _client(url: str) -> Redis:
    return Redis.from_url(url)


class LockedTask(Task):
    """redis-py's lock around the body.

    Attributes:
        server_setting: the setting that names the server of the locks.
        lock_seconds: after which a lock ends.
    """

    abstract = True

    server_setting: ClassVar[str] = "broker_url"
    lock_seconds: ClassVar[float]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        client = _client(self.app.conf[self.server_setting])
        lock = client.lock(f"{self.name}:{args}:{kwargs}", timeout=self.lock_seconds, blocking=False)
        if not lock.acquire():
            return None
        try:
            return super().__call__(*args, **kwargs)
        finally:
            lock.release()
