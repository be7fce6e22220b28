"""How a process is woken for the locks that its copies wait for."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, suppress

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import Held, LockRequest, Record
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.store import Place, Store, WakeUps
from tests.contract import inside
from tests.contract.conftest import blocked, opened
from tests.contract.inside import Process
from tests.patience import until
from tests.redis_server import RedisServer

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


def woken_by(store: Store) -> WakeUps:
    wake_ups = store.wake_ups()
    assert wake_ups is not None
    return wake_ups


def one_copy(key: str) -> int:
    return 1


def no_other_place(key: str) -> None:
    return None


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
                until(lambda: first.compared == [FIRST])

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

    def test_first_copy_that_has_begun_by_itself_leaves_the_lock_to_an_older_place(
        self, store: Store, server: RedisServer
    ) -> None:
        """As it is woken, not as it took its place."""
        lease = taken(store)
        with Process(store, {KEY: FIRST}) as first:
            until(blocked(server))
            with Process(store, {KEY: SECOND}) as second:
                until(blocked(server, 2))
                first.moved[KEY] = THIRD
                assert store.free(lease)
                until(lambda: second.heard == [KEY])
                assert first.heard == []

    def test_older_place_of_a_dead_process_stops_nobody(self, store: Store, server: RedisServer) -> None:
        lease = taken(store)
        with server.client() as client:
            client.zadd(inside.waiting_set(KEY), {"dead": 1})
        with Process(store, {KEY: SECOND}) as process:
            until(blocked(server))
            assert store.free(lease)
            until(lambda: process.heard == [KEY])
            until(lambda: process.compared == [None])  # Any copy may begin.
            with server.client() as client:
                assert client.zscore(inside.waiting_set(KEY), "dead") == 0

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


class TestPassedOn:
    """A wake-up that is of no use to whom it wakes."""

    @pytest.mark.parametrize("of_queue", [True, False])
    def test_that_of_followers_outlives_the_next_message(
        self, store: Store, server: RedisServer, of_queue: bool
    ) -> None:
        """They follow the message before it, and need no lock; but a wake-up for the lock is over when it is taken."""
        key = inside.of_queue(KEY) if of_queue else KEY
        lease = taken(store, key)
        with server.client() as client:
            client.zadd(inside.waiting_set(key), {"a process that is about to block": 1})
            assert store.free(lease)
            assert client.llen(inside.wake_list(key)) == 1
            taken(store, key)
            assert client.llen(inside.wake_list(key)) == of_queue

    @pytest.mark.parametrize("by", ["a message", "a process"])
    def test_it_outlives_the_next_message(self, store: Store, server: RedisServer, by: str) -> None:
        """It may be for a follower of the message before, which nobody would wake until the next message has ended."""
        if by == "a message":
            store.wake(KEY)
        else:
            assert woken_by(store).pass_on(inside.freed(KEY, 0))
        taken(store)
        with server.client() as client:
            assert client.llen(inside.wake_list(KEY)) == 1

    def test_it_goes_to_the_next_process(self, store: Store, server: RedisServer) -> None:
        """The process that has blocked longest has no copy left, and does not know that it is still listed."""
        lease = taken(store)
        with Process(store, {KEY: SECOND}) as process:
            until(blocked(server))
            assert process.wake_ups.pass_on(inside.freed(KEY))
            until(lambda: process.heard == [KEY])
            assert not process.wake_ups.pass_on(inside.freed(KEY, inside.most_passed_on()))
            assert store.free(lease)
            until(lambda: process.heard == [KEY, KEY])

    @pytest.mark.parametrize("passed_on", range(inside.most_passed_on() + 1))
    def test_process_that_leaves_passes_it_on(self, store: Store, server: RedisServer, passed_on: int) -> None:
        """However many had no use for a wake-up before, somebody else may."""
        taken(store)
        wake_ups, (reader, writer) = woken_by(store), os.pipe()
        with os.fdopen(reader), os.fdopen(writer, "wb", 0) as interrupts, server.client() as client:
            interrupts.write(b".")
            assert not wake_ups.wait({KEY: Place(FIRST, 1)}, reader, one_copy, no_other_place)
            until(blocked(server))
            client.rpush(inside.wake_list(KEY), passed_on + 1)
            client.pexpire(inside.wake_list(KEY), 60_000)
            wake_ups.leave()
            expected = min(passed_on + 1, inside.most_passed_on()) + 1
            assert client.lrange(inside.wake_list(KEY), 0, -1) == [str(expected)]

    def test_doubt_wakes_a_process_only_if_the_lock_is_free(self, store: Store, server: RedisServer) -> None:
        leases = [taken(store, limit=2) for _ in "ab"]
        with Process(store, {KEY: SECOND}, limit=2) as process, server.client() as client:
            until(blocked(server))
            process.wake_ups.wake_if_free(KEY, 2)
            assert client.exists(inside.wake_list(KEY)) == 0
            assert process.heard == []
            end(server, leases[0])
            process.wake_ups.wake_if_free(KEY, 2)
            until(lambda: process.heard == [KEY])

    def test_it_takes_the_place_of_no_other(self, store: Store, server: RedisServer) -> None:
        """Of those for a semaphore, each is for another waiter; nobody blocks at this moment."""
        leases = [taken(store, limit=3) for _ in range(3)]
        assert isinstance(store.acquire(asked("waiter", waiting=True, limit=3)), Held)
        for lease in leases:
            assert store.free(lease)
        store.wake(KEY)
        with server.client() as client:
            assert client.llen(inside.wake_list(KEY)) == 3

    def test_locks_take_turns(self, store: Store, server: RedisServer) -> None:
        """Redis takes the first list that has an element: a different one must come first each time."""
        _ = taken(store), taken(store, OTHER)
        heard: list[str] = []
        wake_ups, (reader, writer) = woken_by(store), os.pipe()
        places = {key: Place(FIRST, 1) for key in (KEY, OTHER)}
        with server.client() as client:
            for key in (KEY, OTHER):
                client.rpush(inside.wake_list(key), *[1] * 3)
            while len(heard) < 6:
                heard += [freed.key for freed in wake_ups.wait(places, reader, one_copy, no_other_place)]
        assert heard == [KEY, OTHER] * 3
        wake_ups.leave()
        os.close(reader)
        os.close(writer)


class TestCopies:
    """A copy that is woken, and does not need the lock, wakes the next one."""

    @pytest.mark.parametrize(("in_line", "is_held"), [(True, False), (True, True), (False, False)])
    def test_it_is_already_done(self, store: Store, server: RedisServer, in_line: bool, is_held: bool) -> None:
        copy = Holder("done")
        store.remember(KEY, Record(copy.message, b"SUCCESS", TTL))
        lease = taken(store)
        if not is_held:
            store.free(lease)
        with server.client() as client:
            client.zadd(inside.waiting_set(KEY), {"next": 1})
            assert isinstance(store.acquire(asked(holder=copy, check_finished=True, was_woken=in_line)), Record)
            assert client.llen(inside.wake_list(KEY)) == (in_line and not is_held)

    @pytest.mark.parametrize("waiting", [False, True])
    @pytest.mark.parametrize(("in_line", "others"), [(True, 0), (True, 1), (False, 0)])
    def test_its_message_runs_in_another_slot(
        self, store: Store, server: RedisServer, waiting: bool, in_line: bool, others: int
    ) -> None:
        """It takes no second slot."""
        running = taken(store, limit=2, holder=Holder("runs"))
        for _ in range(others):
            taken(store, limit=2)
        with server.client() as client:
            client.zadd(inside.waiting_set(KEY), {"next": 1})
            found = store.acquire(asked("runs", check_finished=True, limit=2, was_woken=in_line, waiting=waiting))
            assert isinstance(found, Held)
            assert found.owner.startswith(running.owner)
            assert client.llen(inside.wake_list(KEY)) == (in_line and not others)

    def test_it_waits_and_does_not_wake_itself(self, store: Store, server: RedisServer) -> None:
        taken(store, limit=2, holder=Holder("runs"))
        with server.client() as client:
            copy = asked("runs", limit=2, waiting=True)
            assert isinstance(store.acquire(copy), Held)
            with store.waiter(copy) as waiter:
                store.wake(KEY)
                assert isinstance(waiter.wait(TTL), Held)
                assert client.llen(inside.wake_list(KEY)) == 0


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

    @pytest.mark.parametrize(
        "value", ["", "x", "1", "-5:1:{now}", "1:1:-{now}", "9" * 5000, ":::", "1:2:3:4", "\udc80"]
    )
    def test_forged_number_counts_for_nothing(self, store: Store, server: RedisServer, value: str) -> None:
        taken(store)
        with server.client() as client:
            text = value.replace("{now}", str(round(clock.wall() * 1000))).encode(errors="surrogateescape")
            client.hset(inside.line_hash(KEY), "forged", text)
            assert store.inspect(KEY).waiters == 0
            client.delete(inside.line_hash(KEY))
            client.set(inside.line_hash(KEY), "a stranger's")
            assert store.inspect(KEY).waiters == 0

    @pytest.mark.parametrize("is_woken", [False, True])
    def test_waiter_that_leaves_keeps_no_place(self, store: Store, server: RedisServer, is_woken: bool) -> None:
        """Wake-ups would be passed on to it."""
        with server.client() as client:
            client.set(inside.lock_key(KEY), "a stranger's")
            request = asked("waiter", waiting=True)
            assert isinstance(store.acquire(request), Held)
            assert client.zscore(inside.waiting_set(KEY), request.owner)
            with store.waiter(request) as waiter:
                if is_woken:
                    client.rpush(inside.wake_list(KEY), 1)
                assert isinstance(waiter.wait(0.01), Held)
            assert client.zscore(inside.waiting_set(KEY), request.owner) == 0

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

    def test_wake_up_is_passed_on_only_as_often_as_there_are_others(self, store: Store, server: RedisServer) -> None:
        """The places of killed waiters stay as long as somebody waits."""
        lease, killed = taken(store), clock.wall() - 2 * inside.waits_without_a_word()
        with Process(store, {KEY: clock.wall()}) as process, server.client() as client:
            until(blocked(server))
            client.zadd(inside.waiting_set(KEY), {f"killed {number}": round(killed * 1000) for number in range(60)})
            client.config_resetstat()
            assert store.free(lease)
            until(lambda: process.heard == [KEY])
            assert client.info("commandstats")["cmdstat_rpush"]["calls"] < 20

    def test_it_stops_counting_at_once_if_its_place_is_found(self, store: Store, server: RedisServer) -> None:
        """Otherwise within seconds."""
        lease, other = taken(store), taken(store, OTHER)
        with Process(store, {KEY: SECOND}) as process, server.client() as client:
            until(blocked(server))
            for name, at in (("alive", clock.wall()), ("dead", clock.wall() - inside.waits_without_a_word())):
                client.zadd(inside.waiting_set(OTHER), {name: 1})
                client.hset(inside.line_hash(OTHER), name, f"5:1:{round(at * 1000)}")
            assert store.inspect(OTHER).waiters == 5
            client.zadd(inside.waiting_set(KEY), {"dead": 1})
            client.hset(inside.line_hash(KEY), "dead", f"5:1:{round(clock.wall() * 1000)}")
            assert store.inspect(KEY).waiters == 6
            assert store.free(lease)
            until(lambda: process.heard == [KEY])
            assert store.inspect(KEY).waiters == 1
        store.free(other)

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
            with server.client() as client:
                for name, at in (("forged", -1.0), ("well", clock.wall() + TTL)):
                    client.hset(inside.line_hash(KEY), name, f"5:1:{round(at * 1000)}")
            until(lambda: counted(server) == living | {"well"})


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
        (waiting,) = connected(server, "b", "")
        assert waiting not in ports_in_child()


def test_child_of_a_fork_does_not_keep_idle_connections(store: Store, server: RedisServer) -> None:
    before = connected(server, "", "eval")
    taken(store)
    (idle,) = connected(server, "", "eval") - before
    assert idle not in ports_in_child()


@pytest.mark.parametrize("url", ["memory", "redlock"])
def test_store_without_wake_ups_says_so(url: str, server: RedisServer) -> None:
    if url == "memory":
        assert MemoryStore().wake_ups() is None
        return
    with opened(server, 3) as redlock:
        assert redlock.wake_ups() is None


def connected(server: RedisServer, flag: str, last: str) -> set[int]:
    """The ports of those that have a flag ("b": blocked), and whose last command begins so.

    Other tests of this process may have left connections.
    """
    with server.client() as client:
        ours = [it for it in client.client_list() if flag in it["flags"] and it["cmd"].startswith(last)]
    return {int(it["addr"].rpartition(":")[2]) for it in ours}


def ports_in_child() -> set[int]:
    """The ports of the connections that the child of a fork has."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, " ".join(map(str, ports())).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        found = set(map(int, pipe.read().split()))
    os.waitpid(child, 0)
    return found


def ports() -> Iterator[int]:
    """Those of this process's connections."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:  # Others are files and pipes.
            if connection.family == socket.AF_INET:
                yield connection.getsockname()[1]
