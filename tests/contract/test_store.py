"""What every store of locks promises: `store_contract`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import key_of_text
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.base import LockRequest
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.store import Store
from tests.contract.conftest import opened
from tests.contract.store_contract import StoreContract
from tests.contract.store_contract.limits import LimitContract
from tests.contract.store_contract.newest import NewestContract
from tests.patience import LIMIT
from tests.redis_server import RedisServer

KEY = key_of_text("singleton_lock", "job", "1")


class TestMemory(StoreContract, LimitContract, NewestContract):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestRedis(StoreContract, LimitContract, NewestContract):
    @pytest.fixture
    def store(self, redis_server: RedisServer) -> Iterator[Store]:
        with opened(redis_server, 1) as store:
            yield store


class TestRedlock(StoreContract):
    @pytest.fixture
    def store(self, redis_server: RedisServer) -> Iterator[Store]:
        with opened(redis_server, 5) as store:
            yield store


@pytest.mark.parametrize(
    ("store", "limit"), [("memory", 1), ("memory", 2), ("redis", 1), ("redis", 2), ("redlock", 1)], indirect=["store"]
)
def test_extension_does_not_shorten_a_hold(store: Store, limit: int) -> None:
    """A late copy of a message does not know for how long the next attempt needs the lock."""
    owner = new_owner()

    def extend(seconds: float) -> float:
        assert store.renew([Hold(KEY, owner, ttl=seconds, limit=limit, only_longer=True)], timeout=LIMIT) == [True]
        (held,) = store.held(KEY)
        return held.remaining

    assert isinstance(store.acquire(LockRequest(KEY, owner, ttl=60.0, holder=Holder("id"), limit=limit)), Lease)
    assert extend(30.0) > 31.0
    assert extend(90.0) > 61.0
