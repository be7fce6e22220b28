from __future__ import annotations

from collections.abc import Iterator

import hypothesis  # noqa: F401 - its plugin would import it at the very end, when results are being torn down (gh-106905)
import pytest

from celery_singleton_lock.testing import RedisServer


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A server that tests share; each leaves it empty."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A server for one test, which may stop, pause or break it."""
    with RedisServer() as server:
        yield server
