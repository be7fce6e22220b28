"""What every store of locks promises: `celery_singleton_lock/testing/store_contract`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.testing import RedisServer, StoreContract
from celery_singleton_lock.testing.store_contract.newest import NewestContract
from tests.contract.conftest import opened


class TestMemory(StoreContract, NewestContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestRedis(StoreContract, NewestContract):
    @pytest.fixture
    def store(self, redis_server: RedisServer) -> Iterator[Store]:
        with opened(redis_server, 1) as store:
            yield store


class TestRedlock(StoreContract):
    frees_beyond_the_limit = False

    @pytest.fixture
    def store(self, redis_server: RedisServer) -> Iterator[Store]:
        with opened(redis_server, 5) as store:
            yield store
