"""Places in the line of a lock, and who is woken: for main processes with copies, beside waiters in slots."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import Held, LockRequest
from celery_singleton_lock.stores.store import Place, Store
from tests.contract import inside
from tests.contract.conftest import opened
from tests.patience import until
from tests.redis_server import RedisServer

KEY, OTHER = "contract:{wake_ups:1}", "contract:{wake_ups:2}"

#: Seconds: longer than any test.
TTL = 300.0

#: Since when copies wait, the older one first.
FIRST, SECOND = 1000.0, 2000.0


@pytest.fixture
def server(redis_server: RedisServer) -> Iterator[RedisServer]:
    yield redis_server
    redis_server.flush()


@pytest.fixture(params=["redis", "redlock"])
def store(request: pytest.FixtureRequest, server: RedisServer) -> Iterator[Store]:
    with opened(server, 3 if request.param == "redlock" else 1) as store:
        yield store
        store.mailbox.start_anew()  # The processes are gone.


@pytest.fixture
def one(server: RedisServer) -> Iterator[Store]:
    """A store on one server."""
    with closing(open_url(server.url_of(0), {})) as store:
        yield store
        store.mailbox.start_anew()


def asked(task_id: str = "", key: str = KEY, **more: object) -> LockRequest:
    return LockRequest(key, new_owner(), **{"ttl": TTL, "holder": Holder(task_id or new_owner()), **more})  # type: ignore[arg-type]


def taken(store: Store, key: str = KEY, **more: object) -> Lease:
    lease = store.acquire(asked(key=key, **more))  # type: ignore[arg-type]
    assert isinstance(lease, Lease)
    return lease


class Process:
    """A main process with copies that wait for a lock since then.

    Attributes:
        heard: how often it was woken.
    """

    def __init__(self, store: Store, since: float, key: str = KEY, *, copies: int = 1, limit: int = 1) -> None:
        self.store, self.heard = store, 0
        self.place = Place(key, new_owner(), since, copies, limit)
        store.mailbox.expect(key, self.place.name, self._hear)

    def look(self) -> int:
        """How many copies may begin."""
        (may_begin,) = self.store.look([self.place])
        return may_begin

    def leave(self) -> None:
        self.store.mailbox.forget(self.place.name)
        self.store.leave(self.place.key, self.place.name)

    def _hear(self) -> None:
        self.heard += 1


class TestLooks:
    def test_lock_that_is_free_may_be_taken(self, store: Store) -> None:
        lease = taken(store)
        process = Process(store, FIRST)
        assert process.look() == 0
        store.free(lease)
        assert process.look() == 1

    def test_lock_is_left_to_the_one_that_has_waited_for_longer(self, store: Store) -> None:
        first, second = Process(store, FIRST), Process(store, SECOND)
        assert first.look() == 1
        assert second.look() < 0
        first.leave()
        assert second.look() == 1

    def test_waiter_leaves_a_free_lock_to_a_process_that_has_waited_for_longer(self, store: Store) -> None:
        process = Process(store, FIRST)
        assert process.look() == 1
        request = asked(waiting=True)
        found = store.acquire(request)
        assert isinstance(found, Held)
        assert (found.holder, found.owner) == (None, "")
        process.leave()
        with store.waiter(request) as waiter:
            assert isinstance(waiter.ask(), Lease)

    def test_somebody_who_does_not_wait_takes_it(self, store: Store) -> None:
        assert Process(store, FIRST).look() == 1
        assert store.free(taken(store))

    def test_somebody_who_gives_way_leaves_it(self, store: Store) -> None:
        process = Process(store, FIRST)
        assert process.look() == 1
        found = store.acquire(asked(since=SECOND))
        assert isinstance(found, Held)
        assert (found.holder, found.owner) == (None, "")
        assert isinstance(store.acquire(asked(since=FIRST - 1)), Lease)


class TestWoken:
    def test_process_that_has_waited_longest_is_woken(self, store: Store) -> None:
        lease = taken(store)
        second, first = Process(store, SECOND), Process(store, FIRST)
        assert second.look() == first.look() == 0
        assert store.free(lease)
        until(lambda: first.heard)
        assert second.heard == 0

    def test_process_is_woken_for_each_of_its_copies_before_the_next_one(self, one: Store) -> None:
        leases = [taken(one, limit=4) for _ in range(4)]
        first, second = Process(one, FIRST, copies=2, limit=4), Process(one, SECOND, limit=4)
        assert first.look() == second.look() == 0
        for lease, heard in zip(leases, [(1, 0), (2, 0), (2, 1), (3, 1)], strict=True):
            assert one.free(lease)
            until(lambda heard=heard: (first.heard, second.heard) == heard)  # type: ignore[misc]

    def test_woken_process_that_leaves_wakes_the_next(self, store: Store) -> None:
        lease, first, second = taken(store), Process(store, FIRST), Process(store, SECOND)
        assert first.look() == second.look() == 0
        first.leave()
        assert second.heard == 0
        assert first.look() == 0
        assert store.free(lease)
        first.leave()
        until(lambda: second.heard)

    def test_dead_waiter_is_woken_once(self, one: Store, server: RedisServer) -> None:
        lease, process = taken(one), Process(one, SECOND)
        with server.client() as client:
            dead = f"{KEY}:mail:dead|{'0' * 32}"
            client.zadd(inside.waiting_set(KEY), {dead: 1})
            client.hset(inside.asked_hash(KEY), dead, f"{round(clock.wall() * 1000)} 1")
            assert process.look() == 0
            assert one.free(lease)
            assert process.look() < 0, "it may come within a second"
            until(lambda: process.look() == 1)
            assert one.free(taken(one))
            until(lambda: process.heard)
            assert client.zscore(inside.waiting_set(KEY), dead) is None

    def test_user_who_may_not_block_looks(
        self, one: Store, server: RedisServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        with server.client() as client:
            client.acl_setuser("default", enabled=True, commands=["-blpop"])
            try:
                lease = taken(one)
                request = asked("waiter", waiting=True)
                with caplog.at_level(logging.WARNING), one.waiter(request) as waiter:
                    assert isinstance(waiter.ask(), Held)
                    until(lambda: "ask every second" in caplog.text)
                    Process(one, FIRST, OTHER)
                    assert one.free(lease)
                    assert isinstance(waiter.wait(TTL), Lease)
            finally:
                client.acl_setuser("default", enabled=True, commands=["+blpop"])
        assert caplog.text.count("ask every second") == 1


class TestCounted:
    def test_each_copy_in_line_counts(self, store: Store) -> None:
        _ = taken(store), taken(store, OTHER)
        processes = [Process(store, FIRST, copies=3), Process(store, SECOND, copies=4), Process(store, FIRST, OTHER)]
        assert [process.look() for process in processes] == [0, 0, 0]
        assert sorted(held.waiters for _, held in store.all_held("contract")) == [1, 7]
        assert store.inspect(KEY).waiters == 7
        processes[0].leave()
        assert store.inspect(KEY).waiters == 4

    def test_waiter_that_leaves_is_not_in_line(self, store: Store) -> None:
        lease, request = taken(store), asked("waiter", waiting=True)
        assert isinstance(store.acquire(request), Held)
        with store.waiter(request) as waiter:
            assert isinstance(waiter.wait(0.01), Held)
            assert store.inspect(KEY).waiters == 1
        assert store.inspect(KEY).waiters == 0
        assert store.renew([lease], timeout=1.0) == [True]

    @pytest.mark.parametrize("value", ["", "x", "1", "-5 1", "{now} -1", "9" * 5000, "  ", "1 2 3", "\udc80"])
    def test_forged_number_counts_for_nothing(self, one: Store, server: RedisServer, value: str) -> None:
        taken(one)
        with server.client() as client:
            text = value.replace("{now}", str(round(clock.wall() * 1000))).encode(errors="surrogateescape")
            client.hset(inside.asked_hash(KEY), "forged", text)
            assert one.inspect(KEY).waiters == 0
            client.delete(inside.asked_hash(KEY))
            client.set(inside.asked_hash(KEY), "a stranger's")
            assert one.inspect(KEY).waiters == 0


class TestStrangers:
    def test_forged_waiters_hold_nobody_up(self, one: Store, server: RedisServer) -> None:
        lease, process = taken(one), Process(one, SECOND)
        with server.client() as client:
            assert process.look() == 0
            client.zadd(inside.waiting_set(KEY), {"forged": 1, b"\xff": 2})
            client.hset(inside.asked_hash(KEY), mapping={"forged": "9" * 30, b"\xff": "x"})
            assert one.free(lease)
            until(lambda: process.look() == 1)

    def test_values_in_place_of_the_line_are_in_nobodys_way_who_frees(self, one: Store, server: RedisServer) -> None:
        lease = taken(one)
        with server.client() as client:
            for name in (inside.waiting_set(KEY), inside.asked_hash(KEY)):
                client.set(name, "a stranger's")
            assert one.free(lease)
            assert not one.wake(KEY)


def test_every_key_expires(store: Store, server: RedisServer) -> None:
    lease, process = taken(store), Process(store, FIRST)
    assert process.look() == 0
    assert store.free(lease)
    until(lambda: process.heard)
    store.mailbox.forget(process.place.name)
    with server.client() as client:
        assert all(client.pttl(key) > 0 for key in client.scan_iter())
