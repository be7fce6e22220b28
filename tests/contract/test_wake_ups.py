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
from tests.contract.conftest import blocked, opened
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

    def test_semaphore_has_room_for_some(self, one: Store) -> None:
        leases = [taken(one, limit=3) for _ in range(3)]
        process = Process(one, FIRST, limit=3, copies=5)
        assert process.look() == 0
        one.free(leases[0])
        one.free(leases[1])
        assert process.look() == 2

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

    def test_somebody_who_gives_way_gets_no_place(self, store: Store) -> None:
        lease = taken(store)
        assert isinstance(store.acquire(asked(since=FIRST)), Held)
        store.free(lease)
        assert Process(store, SECOND).look() == 1


class TestWoken:
    def test_process_that_has_waited_longest_is_woken(self, store: Store) -> None:
        lease = taken(store)
        second, first = Process(store, SECOND), Process(store, FIRST)
        assert second.look() == first.look() == 0
        assert store.free(lease)
        until(lambda: first.heard)
        assert second.heard == 0

    def test_place_is_kept_after_a_lost_race(self, store: Store) -> None:
        """A newcomer was faster."""
        lease, first, second = taken(store), Process(store, FIRST), Process(store, SECOND)
        for number in range(1, 4):
            assert first.look() == second.look() == 0
            assert store.free(lease)
            until(lambda number=number: first.heard == number)  # type: ignore[misc]
            lease = taken(store)
        assert second.heard == 0

    def test_busy_process_leaves_it_to_the_next(self, store: Store) -> None:
        lease, first, second = taken(store), Process(store, FIRST), Process(store, SECOND)
        assert first.look() == second.look() == 0
        assert store.free(lease)
        until(lambda: first.heard)
        assert store.wake(KEY, leaves=first.place.name)
        until(lambda: second.heard)
        assert second.look() == 1
        assert not store.wake(KEY, leaves=second.place.name)

    def test_woken_process_that_leaves_wakes_the_next(self, store: Store) -> None:
        lease, first, second = taken(store), Process(store, FIRST), Process(store, SECOND)
        assert first.look() == second.look() == 0
        first.leave()
        assert second.heard == 0
        assert first.look() == 0
        assert store.free(lease)
        first.leave()
        until(lambda: second.heard)

    def test_waiter_in_a_slot_is_woken_before_a_younger_copy(self, store: Store) -> None:
        lease, process = taken(store), Process(store, clock.wall() + 60)
        request = asked("waiter", waiting=True)
        assert isinstance(store.acquire(request), Held)
        assert process.look() == 0
        with store.waiter(request) as waiter:
            store.free(lease)
            assert isinstance(waiter.wait(TTL), Lease)
        assert process.heard == 0

    def test_copy_that_is_woken_keeps_the_place_of_its_message_in_a_slot(self, store: Store) -> None:
        """A message has waited since it first asked, wherever it waits."""
        lease, process = taken(store), Process(store, SECOND)
        request = asked("waiter", waiting=True, since=FIRST)
        assert process.look() == 0
        assert isinstance(store.acquire(request), Held)
        with store.waiter(request) as waiter:
            store.free(lease)
            assert isinstance(waiter.wait(TTL), Lease)
        assert process.heard == 0

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

    def test_process_whose_waiter_does_not_come_is_gone_with_all_of_them(self, one: Store, server: RedisServer) -> None:
        lease, process = taken(one), Process(one, SECOND)
        places = {f"{KEY}:mail:dead|{number:032}": number for number in range(1, 4)}
        with server.client() as client:

            def note(*seconds: float) -> None:
                """When each of them asked last, that many seconds ago."""
                for member, ago in zip(places, seconds, strict=False):
                    client.hset(inside.asked_hash(KEY), member, f"{round((clock.wall() - ago) * 1000)} 1")

            client.zadd(inside.waiting_set(KEY), places)
            note(0.5, 0.5, 0.5)
            assert process.look() == 0
            assert one.free(lease)
            assert process.look() < 0, "it may come within a second"
            note(4.1, 1.6, 1.2)  # The first one was woken 1.1 seconds ago.
            assert process.look() == 1
            note(4.1, 0.1)  # Another thread of that process is alive.
            assert process.look() < 0
            note(4.1, 1.6)
            assert one.free(taken(one))
            until(lambda: process.heard)

    def test_dead_waiters_hold_nobody_up_whose_server_had_a_clock_that_was_ahead(
        self, one: Store, server: RedisServer
    ) -> None:
        with server.client() as client:
            for number in range(1, 4):
                dead = f"{KEY}:mail:dead|{number:032}"
                client.zadd(inside.waiting_set(KEY), {dead: number})
                client.hset(inside.asked_hash(KEY), dead, f"{round((clock.wall() + TTL) * 1000)} 1")
        assert Process(one, SECOND).look() == 1

    def test_waiter_whose_clock_is_ahead_waits_since_it_first_asked(self, store: Store) -> None:
        lease, request = taken(store), asked(waiting=True, since=clock.wall() + TTL)
        assert isinstance(store.acquire(request), Held)
        other = Process(store, clock.wall() + 1.0)
        assert other.look() == 0
        with store.waiter(request) as waiter:
            assert isinstance(waiter.ask(), Held)
            store.free(lease)
            while not isinstance(waiter.wait(TTL), Lease):
                pass
        assert other.heard == 0

    def test_one_connection_blocks_whatever_the_number_of_locks(self, one: Store, server: RedisServer) -> None:
        leases = [taken(one), taken(one, OTHER)]
        processes = [Process(one, FIRST), Process(one, FIRST, OTHER)]
        request = asked("waiter", waiting=True)
        assert isinstance(one.acquire(request), Held)
        with one.waiter(request):
            assert [process.look() for process in processes] == [0, 0]
            until(blocked(server))
            for lease in leases:
                one.free(lease)
            until(lambda: all(process.heard for process in processes))

    def test_connection_that_is_cut_is_replaced(self, one: Store, server: RedisServer) -> None:
        lease, process = taken(one), Process(one, FIRST)
        assert process.look() == 0
        until(blocked(server))
        with server.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)
        assert one.free(lease)
        until(lambda: process.heard)

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
