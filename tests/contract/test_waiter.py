"""What a waiter gets from a Redis, whatever happens meanwhile, and what it must not leave behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import Held, LockRequest
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.stores.waiters import Waiter
from tests.contract import inside
from tests.contract.conftest import blocked
from tests.patience import until
from tests.redis_server import RedisServer

KEY = "contract:{waiter:1}"

#: Seconds: longer than any test, so that only what is freed is free.
TTL = 300.0


@pytest.fixture
def store(redis_server: RedisServer) -> Iterator[Store]:
    store = open_url(redis_server.url_of(0), {})
    yield store
    store.close()
    redis_server.flush()


def asked(name: str, **more: object) -> LockRequest:
    return LockRequest(KEY, new_owner(), **{"ttl": TTL, "holder": Holder(name), **more})  # type: ignore[arg-type]


def taken(store: Store, name: str = "first") -> Lease:
    lease = store.acquire(asked(name))
    assert isinstance(lease, Lease)
    return lease


def place(store: Store, name: str = "waiter", **more: object) -> Waiter:
    """A waiter that the server knows: it has found the lock held, and has waited for a moment."""
    request = asked(name, waiting=True, **more)
    assert isinstance(store.acquire(request), Held)
    waiter = store.waiter(request)
    assert isinstance(waiter.wait(0.01), Held)
    return waiter


def waited_for(waiter: Waiter) -> Lease:
    while isinstance(found := waiter.wait(60), Held):
        pass
    assert isinstance(found, Lease)
    return found


def end(server: RedisServer, lease: Lease) -> None:
    """As its ttl does: nobody is woken."""
    with server.client() as client:
        assert inside.end_hold(client, KEY, lease.owner)


def cut(server: RedisServer) -> None:
    """Close the connections of all others."""
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)


class TestLeaving:
    """The lock may be given to a waiter that has already gone."""

    def test_as_it_is_woken(self, store: Store) -> None:
        first = taken(store)
        with place(store):
            store.free(first)
        assert store.held(KEY) == []

    def test_by_a_kill(self, store: Store, redis_server: RedisServer) -> None:
        first = taken(store)
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException), place(store) as waiter:  # Who does not enter it, hears nothing.
                while True:  # Until the kill: each wait is a short one.
                    waiter.wait(60)
            os._exit(0)
        until(blocked(redis_server))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        until(blocked(redis_server, 0))
        store.free(first)
        assert store.held(KEY) == []

    def test_next_waiter_gets_the_lock(self, store: Store) -> None:
        first = taken(store)
        leaving = place(store)
        with place(store, "next") as waiter:
            store.free(first)
            leaving.__exit__(None, None, None)
            assert waited_for(waiter).held


class TestLate:
    """A waiter was frozen, or cut off, as it got the lock."""

    def test_lease_is_trusted_for_no_longer_than_it_lasts(self, store: Store) -> None:
        first = taken(store)
        with place(store) as waiter:
            woken = clock.now()
            store.free(first)
            found = waited_for(waiter)
            assert woken <= found.acquired_at
            (held,) = store.held(KEY)
            assert held.owner == found.owner
            assert found.remaining <= held.remaining
        assert store.free(found)


class TestServer:
    """What becomes of the server, or what others do there."""

    def test_server_that_forgot_the_scripts(self, store: Store, redis_server: RedisServer) -> None:
        """Before it ever waited on this connection, and afterwards."""
        for forgets in (True, False, True, False):
            first = taken(store)
            with place(store) as waiter:
                if forgets:
                    with redis_server.client() as client:
                        client.script_flush()
                store.free(first)
                assert store.free(waited_for(waiter))

    def test_hold_that_nobody_freed(self, store: Store, redis_server: RedisServer) -> None:
        """As if the holder had died."""
        first = taken(store)
        with place(store) as waiter:
            end(redis_server, first)
            assert isinstance(waiter.wait(0.01), Lease)

    def test_value_of_somebody_else(self, store: Store, redis_server: RedisServer) -> None:
        with redis_server.client() as client:
            client.set(inside.lock_key(KEY), "theirs")
            with place(store) as waiter:
                found = waiter.wait(0.01)
                assert isinstance(found, Held)
                assert (found.holder, found.remaining) == (None, float("inf"))
                client.delete(inside.lock_key(KEY))
                assert isinstance(waiter.wait(0.01), Lease)
