"""How a process hears at once that one of its runs must stop."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_singleton_lock import LockUnavailable
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.stops import StopOrder
from celery_singleton_lock.stores.store import Store
from tests.contract import inside
from tests.contract.conftest import opened
from tests.redis_server import RedisServer

PREFIX, OWN, OTHER = "singleton_lock", "host/1/2", "host/3/4"


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
    else:
        with opened(redis_server, 1) as store:
            yield store


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    inside.set_seconds(monkeypatch, "of one wait for a stop", 1)
    inside.set_seconds(monkeypatch, "of one wait for a stop in memory", 0.05)


def test_each_process_gets_its_calls_in_turn(store: Store) -> None:
    own, other = store.stops(PREFIX, OWN), store.stops(PREFIX, OTHER)
    assert own is not None
    assert other is not None
    calls = [StopOrder(new_owner(), f"task {number}") for number in range(3)]
    store.tell(PREFIX, OTHER, calls[0])
    for call in calls[1:]:
        store.tell(PREFIX, OWN, call)
    assert [own.wait(), own.wait(), other.wait()] == [*calls[1:], calls[0]]
    own.close()
    other.close()


def test_call_that_comes_before_anybody_listens_is_heard(store: Store) -> None:
    store.tell(PREFIX, OWN, call := StopOrder(new_owner(), "task"))
    own = store.stops(PREFIX, OWN)
    assert own is not None
    assert own.wait() == call
    own.close()


@pytest.mark.usefixtures("briefly")
def test_wait_ends_after_a_while_without_a_call(store: Store) -> None:
    own = store.stops(PREFIX, OWN)
    assert own is not None
    assert own.wait() is None
    own.close()


@pytest.mark.parametrize("written", [b"", b"{}", b"[1, 2]", b'["' + b"x" * 32 + b'", "id"]', b"\xff", b"[[[["])
def test_foreign_values_are_not_calls(redis_server: RedisServer, written: bytes) -> None:
    key = inside.stop_list(PREFIX, OWN)
    with opened(redis_server, 1) as store, redis_server.client(0) as client:
        own = store.stops(PREFIX, OWN)
        assert own is not None
        client.rpush(key, written)
        assert own.wait() is None
        own.close()


def test_value_of_another_type_is_an_error(redis_server: RedisServer) -> None:
    key = inside.stop_list(PREFIX, OWN)
    with opened(redis_server, 1) as store, redis_server.client(0) as client:
        own = store.stops(PREFIX, OWN)
        assert own is not None
        client.set(key, "of somebody else", ex=60)
        store.tell(PREFIX, OWN, StopOrder(new_owner(), "task"))
        with pytest.raises(LockUnavailable):
            own.wait()
        client.delete(key)
        store.tell(PREFIX, OWN, call := StopOrder(new_owner(), "task"))
        assert own.wait() == call
        own.close()


def test_calls_that_nobody_hears_are_forgotten(redis_server: RedisServer) -> None:
    kept = inside.most_stops()
    with opened(redis_server, 1) as store, redis_server.client(0) as client:
        for _ in range(kept + 1):
            store.tell(PREFIX, OWN, StopOrder(new_owner(), "task"))
        assert client.llen(inside.stop_list(PREFIX, OWN)) == kept
        assert all(client.pttl(key) > 0 for key in client.scan_iter())


def test_redlock_has_no_calls(redis_server: RedisServer) -> None:
    with opened(redis_server, 3) as store:
        assert store.stops(PREFIX, OWN) is None
        store.tell(PREFIX, OWN, StopOrder(new_owner(), "task"))
