"""The ways to lock a Celery task, as each package's README describes them: options for its tasks, and settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from celery import Task
from redis import Redis


@lru_cache(maxsize=1)
def _client(url: str) -> Redis:
    return Redis.from_url(url)


class _Locked(Task):
    """The usual way to lock by hand: redis-py's lock around the body."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        client = _client(self.app.conf.singleton_lock_backend)
        lock = client.lock(f"{self.name}:{args}:{kwargs}", timeout=self.app.conf.singleton_lock_ttl, blocking=False)
        if not lock.acquire():
            return None
        try:
            return super().__call__(*args, **kwargs)
        finally:
            lock.release()


def _singleton(**options: Any) -> Mapping[str, Any]:
    from celery_singleton import Singleton

    return {"base": Singleton, **options}


def _once() -> Mapping[str, Any]:
    from celery_once import QueueOnce

    return {"base": QueueOnce, "once": {"graceful": True}}


def _heimdall(seconds: int) -> Mapping[str, Any]:
    from celery_heimdall import HeimdallTask

    class OnLockServer(HeimdallTask):
        abstract = True

        def setup_redis(self) -> Redis:
            return Redis.from_url(self.app.conf.singleton_lock_backend)

    return {"base": OnLockServer, "heimdall": {"unique": True, "unique_timeout": seconds}}


def _ours(**options: Any) -> Mapping[str, Any]:
    from celery_singleton_lock import SingletonTask

    return {"base": SingletonTask, **options}


#: The task options of each contestant, for locks that last that many seconds.
WAYS: Mapping[str, Callable[[int], Mapping[str, Any]]] = {
    "`SingletonTask`": lambda seconds: _ours(),
    "celery-singleton": lambda seconds: _singleton(),
    "celery-once": lambda seconds: _once(),
    "celery-heimdall": _heimdall,
    "celery-singleton, `lock_expiry`": lambda seconds: _singleton(lock_expiry=seconds),
    "`redis.lock` in the task": lambda seconds: {"base": _Locked},
    "plain `Task`": lambda seconds: {},
}

#: This package when it also locks a task when it is sent, as the others do.
SENT = "`SingletonTask`, `until_executed`"

#: All of `WAYS`, and `SENT`, which comes second.
RACERS: Mapping[str, Callable[[int], Mapping[str, Any]]] = {
    next(iter(WAYS)): next(iter(WAYS.values())),
    SENT: lambda seconds: _ours(lock_scope="until_executed", lock_queue_ttl=float(seconds)),
    **WAYS,
}


def settings(locks: str, seconds: int) -> dict[str, Any]:
    """Settings for where each contestant's locks are, and how long they last."""
    return {
        "singleton_backend_url": locks,
        "ONCE": {"backend": "celery_once.backends.Redis", "settings": {"url": locks, "default_timeout": seconds}},
        "singleton_lock_backend": locks,
        "singleton_lock_ttl": float(seconds),
    }
