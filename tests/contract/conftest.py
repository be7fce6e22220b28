from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.store import Store
from tests.contract import inside
from tests.contract.inside import patient_nodes
from tests.patience import until
from tests.redis_server import RedisServer


@contextmanager
def opened(server: RedisServer, databases: int) -> Iterator[Store]:
    """A store on several databases of one server, which are as independent as servers as far as these promises go."""
    with patient_nodes():
        store = open_url(";".join(map(server.url_of, range(databases))), {"restart_delay": False})
        yield store
        store.close()
    # What is told later would be met by the next test.
    until(lambda: inside.is_settled(store), "it has told the server everything")
    server.flush()


@pytest.fixture(params=["memory", "redis", "redlock"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    with opened(request.getfixturevalue("redis_server"), 5 if request.param == "redlock" else 1) as store:
        yield store


@pytest.fixture(params=["redis", "redlock"])
def store_with_books(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[Store]:
    """A store that keeps what beat has sent, and the journal."""
    with opened(redis_server, 5 if request.param == "redlock" else 1) as store:
        yield store


def blocked(server: RedisServer, many: int = 1) -> Callable[[], bool]:
    """Whether so many clients of a server wait for something."""

    def are() -> bool:
        with server.client() as client:
            return int(client.info("clients")["blocked_clients"]) == many

    return are
