"""Locks outside of tasks: one of each kind that a program may hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from redis import Redis

from celery_singleton_lock import Lock, Redlock, Semaphore
from tests.redis_server import RedisServer

NAME = "nightly report"

#: Seconds of a lease that is renewed while a test waits: a busy machine stops no process for a third of that.
RENEWED = 3.0


@pytest.fixture
def client(own_redis: RedisServer) -> Iterator[Redis]:
    with Redis(port=own_redis.port) as client:
        yield client


@pytest.fixture(params=["Lock", "Redlock", "Semaphore"])
def make(request: pytest.FixtureRequest, client: Redis, own_redis: RedisServer) -> Callable[..., Lock]:
    """Functions that make a lock, by kind."""
    if request.param == "Lock":
        return lambda **options: Lock(client, NAME, **options)
    if request.param == "Semaphore":
        return lambda **options: Semaphore(client, NAME, 1, **options)
    clients = three(own_redis)
    return lambda **options: Redlock(clients, NAME, restart_delay=False, **options)


def three(server: RedisServer) -> list[Redis]:
    """Clients of what looks like three servers: three names and databases of one server."""
    hosts = ("localhost", "127.0.0.1", "127.1")
    return [Redis(host=host, port=server.port, db=number) for number, host in enumerate(hosts)]
