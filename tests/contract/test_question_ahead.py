"""How a waiter asks: with a question that it sends ahead of its wake-up, and what that must not leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from celery_singleton_lock import LockUnavailable, clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import Held, LockRequest, Record, Waiter
from celery_singleton_lock.stores.redis import keyspace, lock_commands
from celery_singleton_lock.stores.redis import waiter as waiter_module
from celery_singleton_lock.stores.redis.script import Script
from celery_singleton_lock.stores.redis.server import STEP_TIMEOUT
from celery_singleton_lock.stores.redis.waiter import PipedWaiter
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.stores.waiters import AskingWaiter
from tests.patience import until
from tests.redis_server import RedisServer

KEY = "contract:{waiter:1}"
ME = Holder("me", 0, "node", 1, 0.0)

#: Seconds: longer than any test, so that only what is freed is free.
TTL = 300.0


def taken(store: Store, **more: object) -> Lease:
    lease = store.acquire(LockRequest(KEY, new_owner(), **{"ttl": TTL, "holder": Holder("first"), **more}))  # type: ignore[arg-type]
    assert isinstance(lease, Lease)
    return lease


def place(store: Store, owner: str | None = None, **more: object) -> Waiter:
    """A waiter in the queue, after a look that found the lock held."""
    owner = owner or new_owner()
    found = store.acquire(LockRequest(KEY, owner, **{"ttl": TTL, "holder": ME, "waiting": True, **more}))  # type: ignore[arg-type]
    assert isinstance(found, Held)
    return store.waiter(LockRequest(KEY, owner, **{"ttl": TTL, "holder": ME, **more}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("found", "frees"), [(Lease(KEY, "o", ttl=TTL, fence=1, sent_at=0.0), False), (None, True)])
def test_lock_that_was_acquired_after_a_lost_connection_is_kept(found: Lease | None, frees: bool) -> None:
    class Broken:
        def __exit__(self, *_: object) -> None: ...

        def pass_on(self) -> None: ...

        def wait(self, timeout: float) -> None:
            raise LockUnavailable("server", "cut")

    left: list[bool] = []
    held = Held(None, "other", 1.0)
    with AskingWaiter(Broken(), lambda: found or held, left.append) as waiter:  # type: ignore[arg-type]
        waiter.wait(0.0)
    assert left == [frees]


@pytest.mark.parametrize(
    ("found", "passes_on"),
    [
        (Lease(KEY, "o", ttl=TTL, fence=1, sent_at=0.0), False),
        (Held(None, "other", 1.0), False),
        (Record("its message", b"", 60.0), True),
        (LockUnavailable("server", "no majority"), True),
    ],
)
def test_wake_up_that_was_not_used_is_passed_on(found: object, passes_on: bool) -> None:
    """A copy that is woken, and finds that its message is done, does not need the lock: the next one does."""
    passed: list[bool] = []

    class Rings:
        def __exit__(self, *_: object) -> None: ...

        def pass_on(self) -> None:
            passed.append(True)

        def wait(self, timeout: float) -> bool:
            return True

    def ask() -> Lease | Held | Record:
        if isinstance(found, Exception):
            raise found
        return found  # type: ignore[return-value]

    with suppress(LockUnavailable), AskingWaiter(Rings(), ask) as waiter:
        waiter.wait(1.0)
    assert passed == [True] * passes_on


@pytest.fixture
def redis_store(redis_server: RedisServer) -> Iterator[Store]:
    store = open_url(redis_server.url_of(0), {})
    with redis_server.client() as client:
        for script in vars(lock_commands).values():  # Else a test that comes first sees NOSCRIPT answers counted.
            if isinstance(script, Script):
                client.script_load(script.text)
    yield store
    store.close()
    redis_server.flush()


def piped(store: Store, **more: object) -> PipedWaiter:
    """A waiter whose question is already sent behind its blocking command."""
    waiter = place(store, **more)
    assert isinstance(waiter, PipedWaiter)
    assert isinstance(waiter.wait(0.01), Held)
    return waiter


class TestQuestionAhead:
    """On one server: its answer may come when the waiter has already gone."""

    def test_nobody_else_gets_the_lock_in_between(self, redis_store: Store, redis_server: RedisServer) -> None:
        first = taken(redis_store)
        with piped(redis_store) as waiter, redis_server.client() as client:
            redis_store.free(first)
            until(lambda: redis_store.held(KEY))
            assert isinstance(redis_store.acquire(LockRequest(KEY, new_owner(), ttl=TTL, holder=Holder("next"))), Held)
            before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
            assert isinstance(waiter.wait(60), Lease)
            assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == before + 1, "the waiter confirms"

    def test_question_that_comes_after_the_waiter_has_left_takes_nothing(self, redis_store: Store) -> None:
        """As when the server sees late that the connection is closed."""
        first = taken(redis_store)
        gone = piped(redis_store)
        gone._leave(True)
        with piped(redis_store) as waiter:
            redis_store.free(first)
            found = waiter.wait(60)
            assert isinstance(found, Lease), "the wake-up was passed on"
            assert [held.owner for held in redis_store.held(KEY)] == [found.owner]
        redis_store.free(found)
        gone.__exit__(None, None, None)

    def test_late_leave_does_not_free_the_lock_that_the_owner_got_since(self, redis_store: Store) -> None:
        """The server was silent as the waiter left and asked again; it carries out both when it is back. Once the owner
        has freed that lock, it takes nothing any more.
        """
        first, owner = taken(redis_store), new_owner()
        waiter = piped(redis_store, owner=owner)
        redis_store.free(first)
        until(lambda: redis_store.held(KEY))
        again = redis_store.acquire(LockRequest(KEY, owner, ttl=TTL, holder=replace(ME, since=1.0), waiting=True))
        assert isinstance(again, Lease)
        waiter._leave(True)
        assert [held.owner for held in redis_store.held(KEY)] == [owner]
        waiter.__exit__(None, None, None)
        assert [held.owner for held in redis_store.held(KEY)] == [owner]
        redis_store.free(again)
        with pytest.raises(LockUnavailable, match="given up"):
            redis_store.acquire(LockRequest(KEY, owner, ttl=TTL, holder=replace(ME, since=2.0)))

    def test_waiter_has_the_lock_for_a_moment_until_it_confirms(
        self, redis_store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It trusts its lease from the moment it confirms."""
        monkeypatch.setattr(lock_commands, "HAND_OVER_TTL", TTL / 10)
        first = taken(redis_store)
        waiter = piped(redis_store)
        redis_store.free(first)
        until(lambda: redis_store.held(KEY))
        (provisional,) = redis_store.held(KEY)
        assert 0 < provisional.remaining <= TTL / 10
        woken = clock.now()
        found = waiter.wait(60)
        assert isinstance(found, Lease)
        assert woken <= found.acquired_at <= clock.now()
        (confirmed,) = redis_store.held(KEY)
        assert confirmed.owner == provisional.owner == found.owner
        assert found.remaining <= confirmed.remaining
        waiter.__exit__(None, None, None)
        assert redis_store.free(found)

    def test_waiter_that_confirms_too_late_keeps_waiting(
        self, redis_store: Store, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It was frozen, say, and hears that it got the lock when another already has it."""
        monkeypatch.setattr(lock_commands, "HAND_OVER_TTL", 0.05)
        first = taken(redis_store)
        waiter = piped(redis_store)
        redis_store.free(first)
        with redis_server.client() as client:
            until(lambda: client.exists(keyspace.fence_key(KEY)) and not redis_store.held(KEY))
        other = taken(redis_store, holder=Holder("other"))
        found = waiter.wait(0.05)
        assert isinstance(found, Held)
        assert found.owner == other.owner
        redis_store.free(other)
        while isinstance(found, Held):
            found = waiter.wait(60)
        assert isinstance(found, Lease)
        assert redis_store.renew([found], timeout=1.0) == [True]
        waiter.__exit__(None, None, None)

    def test_server_that_forgot_the_scripts(self, redis_store: Store, redis_server: RedisServer) -> None:
        first = taken(redis_store)
        with piped(redis_store) as waiter:
            with redis_server.client() as client:
                client.script_flush()
            redis_store.free(first)
            found = waiter.wait(60)
            while isinstance(found, Held):
                found = waiter.wait(60)
            assert isinstance(found, Lease)
            redis_store.free(found)
            with redis_server.client() as client:
                assert client.script_exists(lock_commands.HAND_OVER.sha) == [True], "the next hand-over is quick again"

    def test_server_that_forgot_a_script_that_this_connection_used(
        self, redis_store: Store, redis_server: RedisServer
    ) -> None:
        """The question named the script by its digest; the waiter asks again, and sends the text from then on."""
        with redis_server.client() as client:
            for forgets in (False, True, False):
                first = taken(redis_store)
                with piped(redis_store) as waiter:
                    if forgets:
                        client.script_flush()
                    redis_store.free(first)
                    while isinstance(found := waiter.wait(60), Held):
                        pass
                    assert isinstance(found, Lease)
                    redis_store.free(found)
                assert client.script_exists(lock_commands.HAND_OVER.sha) == [not forgets]


def test_waiter_asks_before_its_place_is_forgotten() -> None:
    """Even if it looks just before that is due, and the server answers late."""
    assert waiter_module.ONLY_LOOKS + waiter_module.SLICE + STEP_TIMEOUT < lock_commands.WAITING_TTL


class TestLooks:
    """A waiter that is not woken only looks who has the lock; it asks for the lock when that has changed."""

    @pytest.fixture(autouse=True)
    def only_looks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(waiter_module, "ONLY_LOOKS", 600.0)

    @pytest.mark.parametrize("holds_on", [True, False])
    def test_same_holder(
        self, redis_store: Store, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, holds_on: bool
    ) -> None:
        if not holds_on:
            monkeypatch.setattr(waiter_module, "ONLY_LOOKS", 0.0)
        first = taken(redis_store)
        with piped(redis_store) as waiter, redis_server.client() as client:
            client.config_resetstat()
            found = waiter.wait(0.01)
            asked = "cmdstat_evalsha" in client.info("commandstats")
        assert isinstance(found, Held)
        assert (found.owner, found.holder) == (first.owner, Holder("first"))
        assert 0 < found.remaining <= TTL
        assert asked is not holds_on, "in between, it asks"

    def test_server_that_may_have_forgotten_that_it_waits(self, redis_store: Store, redis_server: RedisServer) -> None:
        """It was restarted, for example: the next end of a hold is to wake the waiter."""
        taken(redis_store)
        with piped(redis_store) as waiter, redis_server.client() as client:
            client.delete(keyspace.waiting_key(KEY))
            client.client_kill_filter(_type="normal", skipme=True)
            while not client.exists(keyspace.waiting_key(KEY)):
                assert isinstance(waiter.wait(0.01), Held)
