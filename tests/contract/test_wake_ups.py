"""How a process is woken for the locks that its copies wait for."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import Held, LockRequest
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.testing import RedisServer
from tests.contract import inside
from tests.contract.conftest import blocked
from tests.contract.inside import Process
from tests.patience import until

KEY, OTHER = "contract:{wake_ups:1}", "contract:{wake_ups:2}"

#: Seconds: longer than any test.
TTL = 300.0

#: Since when copies wait, the older one first.
FIRST, SECOND, THIRD = 1000.0, 2000.0, 3000.0


@pytest.fixture
def server(redis_server: RedisServer) -> Iterator[RedisServer]:
    yield redis_server
    redis_server.flush()


@pytest.fixture
def store(server: RedisServer) -> Iterator[Store]:
    with closing(open_url(server.url_of(0), {})) as store:
        yield store


def asked(task_id: str = "", key: str = KEY, **more: object) -> LockRequest:
    return LockRequest(key, new_owner(), **{"ttl": TTL, "holder": Holder(task_id or new_owner()), **more})  # type: ignore[arg-type]


def taken(store: Store, key: str = KEY, **more: object) -> Lease:
    lease = store.acquire(asked(key=key, **more))  # type: ignore[arg-type]
    assert isinstance(lease, Lease)
    return lease


def end(server: RedisServer, lease: Lease) -> None:
    """As its ttl does: nobody is woken."""
    with server.client() as client:
        assert inside.end_hold(client, lease.key, lease.owner)


def stand_and_die(store: Store, server: RedisServer, places: Mapping[str, float], others: int = 0) -> None:
    """A process is killed while it waits, beside so many others."""
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException), Process(store, places):
            signal.pause()
        os._exit(0)
    until(blocked(server, others + 1))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    until(blocked(server, others))


def counted(server: RedisServer) -> set[str]:
    """Those whose copies are counted."""
    with server.client() as client:
        return {it for name in client.scan_iter(f"{KEY}:*", _type="hash") for it in client.hkeys(name)}


class TestWoken:
    def test_release_wakes_the_process(self, store: Store, server: RedisServer) -> None:
        lease, other = taken(store), taken(store, OTHER)
        with Process(store, {KEY: FIRST, OTHER: SECOND}) as process:
            until(blocked(server))
            assert process.heard == []
            assert store.free(lease)
            until(lambda: process.heard == [KEY])
            assert store.free(other)
            until(lambda: process.heard == [KEY, OTHER])

    def test_lock_that_was_freed_before_wakes_the_process_at_once(self, store: Store, server: RedisServer) -> None:
        """Between the refusal and the copy's arrival there was nobody to wake."""
        other = taken(store, OTHER)
        with Process(store, {OTHER: FIRST}) as process:
            until(blocked(server))
            process.stand({KEY: FIRST, OTHER: FIRST})
            until(lambda: process.heard == [KEY])
            assert store.free(other)
            until(lambda: process.heard == [KEY, OTHER])

    @pytest.mark.parametrize("free", [1, 0])
    def test_semaphore_is_free_while_one_slot_is(self, store: Store, server: RedisServer, free: int) -> None:
        leases = [taken(store, limit=2) for _ in range(2 - free)]
        with Process(store, {KEY: FIRST}, limit=2) as process:
            until(blocked(server))
            until(lambda: len(process.heard) == free)
            assert store.free(leases[0])
            until(lambda: len(process.heard) == free + 1)

    def test_one_connection_is_blocked_whatever_the_number_of_locks(self, store: Store, server: RedisServer) -> None:
        _ = taken(store), taken(store, OTHER)
        with Process(store, {KEY: FIRST, OTHER: FIRST}):
            until(lambda: store.inspect(KEY).waiters == store.inspect(OTHER).waiters == 1)
            until(blocked(server))


class TestOrder:
    """Who has waited longest is woken first, whoever asked first."""

    def test_process_with_the_older_copy_is_woken(self, store: Store, server: RedisServer) -> None:
        lease = taken(store)
        with Process(store, {KEY: SECOND}) as second:
            until(blocked(server))
            with Process(store, {KEY: FIRST}) as first:
                until(blocked(server, 2))
                assert store.free(lease)
                until(lambda: first.heard == [KEY])
                assert second.heard == []

    @pytest.mark.parametrize("asks_at", [0, 4, 6])
    def test_oldest_of_many_processes_is_woken(self, store: Store, server: RedisServer, asks_at: int) -> None:
        taken(store)
        places = [1000.0 * number for number in range(2, 8)]
        places.insert(asks_at, FIRST)
        with ExitStack() as exits:
            processes: list[Process] = []
            for since in places:
                processes.append(exits.enter_context(Process(store, {KEY: since})))
                until(blocked(server, len(processes)))
            store.wake(KEY)
            until(lambda: any(process.heard for process in processes))
            assert [process.places[KEY] for process in processes if process.heard] == [FIRST]

    def test_copy_that_has_begun_by_itself_hides_no_older_one(self, store: Store, server: RedisServer) -> None:
        taken(store)
        with Process(store, {KEY: FIRST}) as third:
            until(blocked(server))
            third.stand({KEY: THIRD})
            with Process(store, {KEY: SECOND}) as second:
                until(blocked(server, 2))
                store.wake(KEY)
                until(lambda: third.heard or second.heard)
                assert (third.heard, set(second.heard)) == ([], {KEY})

    def test_wake_up_that_was_given_back_goes_to_the_oldest(self, store: Store, server: RedisServer) -> None:
        taken(store)
        with Process(store, {KEY: SECOND}) as second:
            until(blocked(server))
            with Process(store, {KEY: FIRST}) as first:
                until(blocked(server, 2))
                second.give_back(KEY)
                until(lambda: first.heard or second.heard)
                assert (set(first.heard), second.heard) == ({KEY}, [])

    def test_question_of_a_waiter_removes_no_place(self, store: Store, server: RedisServer) -> None:
        """However long the copies have waited."""
        _, now = taken(store), clock.wall()
        with Process(store, {KEY: now - 3600}) as second:
            until(blocked(server))
            with Process(store, {KEY: now - 7200}) as first:
                until(blocked(server, 2))
                assert isinstance(store.acquire(asked("waiter", waiting=True)), Held)
                store.wake(KEY)
                until(lambda: first.heard or second.heard)
                assert (set(first.heard), second.heard) == ({KEY}, [])

    def test_waiter_in_a_slot_is_woken_before_a_younger_copy(self, store: Store, server: RedisServer) -> None:
        lease = taken(store)
        with Process(store, {KEY: clock.wall() + 60}) as process:
            until(blocked(server))
            request = asked("waiter", waiting=True)
            found: object = store.acquire(request)
            assert isinstance(found, Held)
            with store.waiter(request) as waiter:

                def free_when_both_wait() -> None:
                    until(blocked(server, 2))
                    store.free(lease)

                freeing = threading.Thread(target=free_when_both_wait)
                freeing.start()
                while isinstance(found, Held):
                    found = waiter.wait(TTL)
                freeing.join()
            assert isinstance(found, Lease)
            assert process.heard == []


class TestLooks:
    """A lock is found free in the end, whoever was not told of it."""

    def test_lock_that_nobody_frees(self, store: Store, server: RedisServer) -> None:
        """Its holder has died, and its lease ended; or the wake-up went to a process that was killed with it."""
        lease = taken(store)
        with Process(store, {KEY: FIRST}) as process:
            until(blocked(server))
            end(server, lease)
            until(lambda: process.heard)
            assert set(process.heard) == {KEY}

    @pytest.mark.parametrize("changes", ["another lock", "its own place"])
    def test_other_copies_that_come_and_go_delay_no_look(self, store: Store, server: RedisServer, changes: str) -> None:
        """A busy process has other places many times a second."""
        lease, _ = taken(store), taken(store, OTHER)
        moments = itertools.count(1)
        with Process(store, {KEY: FIRST, OTHER: FIRST}) as process:
            until(blocked(server))
            end(server, lease)

            def is_heard_of() -> bool:
                moment = next(moments)
                other = {OTHER: FIRST + moment} if changes == "its own place" or moment % 2 else {}
                process.stand({KEY: FIRST, **other})
                return KEY in process.heard

            until(is_heard_of)

    def test_lock_whose_wake_up_was_given_back(self, store: Store, server: RedisServer) -> None:
        """Nobody else is there, and a copy comes a moment later: it finds the lock free."""
        lease = taken(store)
        with Process(store, {KEY: FIRST}) as process:
            until(blocked(server))
            assert store.free(lease)
            until(lambda: process.heard == [KEY])
            process.give_back(KEY)
            until(lambda: len(process.heard) > 1)

    def test_lock_that_was_freed_while_the_connection_was_cut(self, store: Store, server: RedisServer) -> None:
        lease = taken(store)
        with Process(store, {KEY: FIRST}) as process, server.client() as client:
            until(blocked(server))
            for one in client.client_list():
                if "b" in one["flags"]:
                    client.client_kill(one["addr"])
            assert store.free(lease)
            until(lambda: process.heard)
            assert set(process.heard) == {KEY}
            until(lambda: process.errors)


class TestCounted:
    def test_each_copy_in_line_counts(self, store: Store) -> None:
        """However long its process has been in line; the copies that came last count a moment later."""
        _ = taken(store), taken(store, OTHER)
        young = clock.wall()
        with Process(store, {KEY: FIRST, OTHER: young}) as process, Process(store, {KEY: SECOND}) as another:
            process.copies = {KEY: 3, OTHER: 2}
            another.copies = {KEY: 4}
            until(lambda: [held.waiters for _, held in store.all_held("contract")].count(7) == 1)
            until(lambda: store.inspect(OTHER).waiters == 2)
            process.stand({OTHER: young})
            until(lambda: store.inspect(KEY).waiters == 4)
            process.copies = {OTHER: 1}
            until(lambda: store.inspect(OTHER).waiters == 1)
            assert [held.waiters for held in store.held(OTHER)] == [1]
        assert (store.inspect(KEY).waiters, store.inspect(OTHER).waiters) == (0, 0)

    def test_process_that_left_is_not_in_line(self, store: Store, server: RedisServer) -> None:
        _ = taken(store), taken(store, OTHER)
        with Process(store, {KEY: FIRST, OTHER: FIRST}) as process:
            until(blocked(server))
            process.stand({OTHER: FIRST})
            until(lambda: store.inspect(KEY).waiters == 0)
            assert store.inspect(OTHER).waiters == 1
        assert store.inspect(OTHER).waiters == 0
        until(blocked(server, 0))

    def test_waiter_that_leaves_is_not_in_line(self, store: Store, server: RedisServer) -> None:
        """Wake-ups would be passed on to it."""
        lease, request = taken(store), asked("waiter", waiting=True)
        assert isinstance(store.acquire(request), Held)
        with store.waiter(request) as waiter:
            assert isinstance(waiter.wait(0.01), Held)
            assert store.inspect(KEY).waiters == 1
        assert store.inspect(KEY).waiters == 0
        assert store.renew([lease], timeout=1.0) == [True]


class TestKilled:
    def test_it_does_not_hold_up_the_line(self, store: Store, server: RedisServer) -> None:
        """However many they are: a wake-up costs a few commands for each."""
        lease = taken(store)
        for number in range(5):
            stand_and_die(store, server, {KEY: FIRST + number})
        with Process(store, {KEY: clock.wall()}) as process, server.client() as client:
            until(blocked(server))
            client.config_resetstat()
            assert store.free(lease)
            until(lambda: process.heard == [KEY])
            assert sum(it["calls"] for it in client.info("commandstats").values()) < 100

    def test_it_stops_counting(self, store: Store, server: RedisServer) -> None:
        taken(store)
        stand_and_die(store, server, {KEY: FIRST})
        with Process(store, {KEY: SECOND}):
            until(lambda: store.inspect(KEY).waiters == 1)

    def test_it_leaves_nothing_behind(self, store: Store, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also if others wait for the lock all the time, so that the key never expires."""
        inside.set_seconds(monkeypatch, "until a dead process is removed from a line", 4.0)
        taken(store)
        with Process(store, {KEY: FIRST}):
            until(lambda: counted(server))
            living = counted(server)
            stand_and_die(store, server, {KEY: SECOND}, others=1)
            assert counted(server) > living
            until(lambda: counted(server) == living)


class TestStrangers:
    """What others have put in place of our values."""

    def test_other_locks_are_not_held_up(self, store: Store, server: RedisServer) -> None:
        other, lease = taken(store, OTHER), taken(store)
        with server.client() as client, Process(store, {KEY: FIRST, OTHER: FIRST}) as process:
            until(blocked(server))
            ours = [name for kind in ("zset", "hash", "list") for name in client.scan_iter(f"{KEY}:*", _type=kind)]
            assert ours
            for name in (*ours, inside.wake_list(KEY)):
                client.set(name, "a stranger's")
            process.stand({KEY: SECOND, OTHER: FIRST})
            until(blocked(server))
            assert store.inspect(KEY).waiters == 0
            assert store.free(other)
            until(lambda: OTHER in process.heard)
            end(server, lease)
            until(lambda: KEY in process.heard)  # Once it is due for a look.
            assert process.errors == []

    def test_wake_up_counts(self, store: Store, server: RedisServer) -> None:
        taken(store)
        with server.client() as client, Process(store, {KEY: FIRST}) as process:
            until(blocked(server))
            for value in ("9" * 5000, "", "nonsense", "-1"):
                many = len(process.heard)
                client.rpush(inside.wake_list(KEY), value)
                until(lambda many=many: len(process.heard) > many)  # type: ignore[misc]
            assert process.errors == []


def test_every_key_expires(store: Store, server: RedisServer) -> None:
    lease = taken(store)
    with Process(store, {KEY: FIRST}) as process, server.client() as client:
        until(blocked(server))
        process.stand({KEY: SECOND})
        process.give_back(OTHER)
        assert store.free(lease)
        until(lambda: process.heard == [KEY])
        assert all(client.pttl(key) > 0 for key in client.scan_iter())


def test_child_of_a_fork_does_not_keep_the_connection(store: Store, server: RedisServer) -> None:
    """Otherwise the server believes that a killed process is still blocked, and wakes it."""
    taken(store)
    with Process(store, {KEY: FIRST}):
        until(blocked(server))
        inherited = sockets()
        child = os.fork()
        if child == 0:
            os._exit(sockets())  # The store's idle connections are dropped when the child uses it.
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == inherited - 1


def sockets() -> int:
    """How many this process has."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # The descriptor of the listing itself.
            found += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return found
