"""Lock objects of a client share a store, as long as the client connects in the same way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis

from celery_singleton_lock import Lock, Redlock
from celery_singleton_lock.lock import clients
from celery_singleton_lock.stores.redis.store import RedisStore

Made = Callable[[], Lock]


def three() -> list[Redis]:
    return [Redis(port=port) for port in (1, 2, 3)]


@pytest.fixture(params=["one", "one by its URL", "three"])
def given(request: pytest.FixtureRequest) -> list[Redis]:
    """Clients that are not connected."""
    ways = {"one": lambda: [Redis(port=1)], "one by its URL": lambda: [Redis.from_url("redis://h:1/2")], "three": three}
    return ways[request.param]()


@pytest.fixture
def make(given: list[Redis]) -> Made:
    return lambda: Lock(given[0], "x") if len(given) == 1 else Redlock(given, "x")


def test_next_object_shares_the_store_of_the_last(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make()

    def looked_at(*_: object) -> object:
        raise AssertionError("its options were looked at again")

    monkeypatch.setattr(clients, "_config", looked_at)
    assert make()._shared is first._shared


@pytest.mark.parametrize("name", ["password", "a_new_one"])
def test_client_that_connects_in_another_way_gets_another_store(make: Made, given: list[Redis], name: str) -> None:
    first = make()
    given[-1].connection_pool.connection_kwargs[name] = "secret"
    assert make()._shared is not first._shared


def test_client_with_another_connection_class_gets_another_store(make: Made, given: list[Redis]) -> None:
    first, pool = make(), given[-1].connection_pool
    pool.connection_class = type("Another", (pool.connection_class,), {})
    assert make()._shared is not first._shared


def test_redlock_does_not_keep_its_other_clients_alive() -> None:
    one, *others = three()
    Redlock([one, *others], "x")
    pools = [weakref.ref(client.connection_pool) for client in others]
    others.clear()
    gc.collect()
    assert [pool() for pool in pools] == [None, None]


def test_locks_with_different_clients_or_options_do_not_share() -> None:
    one, two, three_, four = (Redis(port=port) for port in (1, 2, 3, 4))
    first = Redlock([one, two, three_], "x")
    assert Redlock([one, two, four], "x")._shared is not first._shared
    assert Redlock([one, two, three_], "x", restart_delay=False)._shared is not first._shared
    assert Lock(one, "x")._shared is not first._shared


def test_two_clients_of_one_server_are_refused_later_as_well() -> None:
    those = three()
    Redlock(those, "x")
    those[1].connection_pool.connection_kwargs["port"] = 1
    with pytest.raises(ValueError, match="2 clients of localhost:1; allowed: each of a different server"):
        Redlock(those, "x")


@pytest.mark.timeout(30)
def test_signal_handler_may_take_a_lock_while_the_first_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    client, shared = Redis(port=4), []
    store = clients.RedisStore

    def interrupted(*args: Any, **kwargs: Any) -> RedisStore:
        monkeypatch.setattr(clients, "RedisStore", store)
        shared.append(Lock(client, "of the handler")._shared)
        return store(*args, **kwargs)

    monkeypatch.setattr(clients, "RedisStore", interrupted)
    assert Lock(client, "first")._shared is shared[0]
