from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.testing import RedisServer


@pytest.fixture(params=["memory", "redis", "redlock"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    # Databases of one server are as independent as servers, as far as these promises go.
    urls = [server.url_of(database) for database in range(5 if request.param == "redlock" else 1)]
    store = open_url(";".join(urls), {"restart_delay": False})
    yield store
    store.close()
    server.flush()
