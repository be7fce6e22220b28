"""How a process is woken for the locks that its copies wait for."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from itertools import cycle

import pytest

from celery_singleton_lock import LockUnavailable, clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import QUEUE
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.options.app import parse_backend
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import Held, LockRequest, Record
from celery_singleton_lock.stores.memory import MemoryStore
from celery_singleton_lock.stores.redis import in_line, keyspace, wake_ups
from celery_singleton_lock.stores.redis.address import of_each
from celery_singleton_lock.stores.redis.lock_commands import WAITING_TTL
from celery_singleton_lock.stores.redis.server import Server
from celery_singleton_lock.stores.redis.wake_ups import MAX_PASSED_ON, REFRESH, RedisWakeUps
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.stores.wake_ups import Freed, Place, WakeUps
from celery_singleton_lock.testing import RedisServer
from tests.integration.conftest import until
from tests.patience import LIMIT

KEY, OTHER = "contract:{wake_ups:1}", "contract:{wake_ups:2}"

#: Seconds: longer than any test.
TTL = 300.0

#: Places, the older one first.
FIRST, SECOND = Place(1000.0, 1), Place(2000.0, 1)


@pytest.fixture
def server(redis_server: RedisServer) -> Iterator[RedisServer]:
    yield redis_server
    redis_server.flush()


@pytest.fixture
def store(server: RedisServer) -> Iterator[Store]:
    with closing(open_url(server.url_of(0), {})) as store:
        yield store


def taken(store: Store, key: str = KEY, *, limit: int = 1, task_id: str = "") -> Lease:
    holder = Holder(task_id or new_owner())
    lease = store.acquire(LockRequest(key, new_owner(), ttl=TTL, holder=holder, limit=limit))
    assert isinstance(lease, Lease)
    return lease


class Process:
    """Waits in a thread, as a worker's main process does, and notes what it hears."""

    def __init__(self, store: Store | Halves, **places: Place) -> None:
        wake_ups = store.wake_ups()
        assert isinstance(wake_ups, RedisWakeUps)
        self.wake_ups: WakeUps = wake_ups
        self.places = {{"one": KEY, "two": OTHER}[name]: place for name, place in places.items()}
        self.heard: list[str] = []
        #: The places that were compared with the others' places.
        self.compared: list[Place | None] = []
        self.errors: list[Exception] = []
        self.stands = threading.Event()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._stopped = False
        self.copies = {KEY: 1, OTHER: 1}
        #: Its places by now, where its first copy has begun by itself.
        self.moved: dict[str, Place] = {}
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Process:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self.interrupt()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()
        self.wake_ups.leave()
        os.close(self._reader)
        os.close(self._writer)

    def interrupt(self) -> None:
        os.write(self._writer, b".")

    def stand(self, **places: Place) -> None:
        """Wait for other locks from now on."""
        self.places = {{"one": KEY, "two": OTHER}[name]: place for name, place in places.items()}
        self.interrupt()

    def _run(self) -> None:
        while not self._stopped:
            try:
                freed = self.wake_ups.wait(self.places, self._reader, self.copies.__getitem__, self.moved.get)
            except LockUnavailable as error:
                self.errors.append(error)
                clock.sleep(0.02)
                continue
            self.heard += [one.key for one in freed]
            self.compared += [one.place for one in freed]
            with suppress(BlockingIOError):
                os.read(self._reader, 100)


def one_copy(key: str) -> int:
    return 1


def no_other_place(key: str) -> None:
    return None


def blocked(server: RedisServer, many: int = 1) -> Callable[[], bool]:
    def are() -> bool:
        with server.client() as client:
            return int(client.info("clients")["blocked_clients"]) == many

    return are


def waits(server: RedisServer, key: str = KEY) -> int:
    with server.client() as client:
        return int(client.zcard(keyspace.waiting_key(key)))


def test_each_copy_in_line_counts(store: Store, server: RedisServer) -> None:
    """However long its process has been in line; the copies that came last count a moment later."""
    _ = taken(store), taken(store, OTHER)
    young = Place(clock.wall(), 1)
    with Process(store, one=FIRST, two=young) as process, Process(store, one=SECOND) as another:
        process.copies = {KEY: 3, OTHER: 2}
        another.copies = {KEY: 4}
        until(lambda: [held.waiters for _, held in store.all_held("contract")].count(7) == 1)
        until(lambda: store.inspect(OTHER).waiters == 2)
        process.stand(two=young)
        until(lambda: store.inspect(KEY).waiters == 4)
        process.copies = {OTHER: 1}
        until(lambda: store.inspect(OTHER).waiters == 1)
        assert [held.waiters for held in store.held(OTHER)] == [1]
    assert (store.inspect(KEY).waiters, store.inspect(OTHER).waiters) == (0, 0)


def test_dead_process_stops_counting(store: Store, server: RedisServer) -> None:
    """At once if its place is found to be that of a dead process; otherwise within seconds."""
    lease, other = taken(store), taken(store, OTHER)
    with Process(store, one=SECOND) as process, server.client() as client:
        until(blocked(server))
        for name, at in (("alive", clock.wall()), ("dead", clock.wall() - WAITING_TTL)):
            client.zadd(keyspace.waiting_key(OTHER), {name: 1})
            client.hset(keyspace.line_key(OTHER), name, f"5:1:{round(at * 1000)}")
        assert store.inspect(OTHER).waiters == 5
        client.zadd(keyspace.waiting_key(KEY), {"dead": 1})
        client.hset(keyspace.line_key(KEY), "dead", f"5:1:{round(clock.wall() * 1000)}")
        assert store.inspect(KEY).waiters == 6
        assert store.free(lease)
        until(lambda: process.heard == [KEY])
        assert store.inspect(KEY).waiters == 1
    store.free(other)


def test_killed_waiters_do_not_hold_up_the_line(store: Store, server: RedisServer) -> None:
    """Their places stay as long as somebody waits; a wake-up is passed on only as often as there are others."""
    lease, killed = taken(store), clock.wall() - 2 * WAITING_TTL
    with Process(store, one=Place(clock.wall(), 1)) as process, server.client() as client:
        until(blocked(server))
        client.zadd(keyspace.waiting_key(KEY), {f"killed {number}": round(killed * 1000) for number in range(60)})
        client.config_resetstat()
        assert store.free(lease)
        until(lambda: process.heard == [KEY])
        assert client.info("commandstats")["cmdstat_rpush"]["calls"] < 20


def test_process_that_has_died_long_ago_leaves_nothing_behind(
    store: Store, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if others wait for the lock all the time, so that the key never expires."""
    monkeypatch.setattr(in_line, "LONG_GONE", 2 * REFRESH)
    lease = taken(store)
    with Process(store, one=FIRST) as process, server.client() as client:
        until(blocked(server))
        (living,) = client.hkeys(keyspace.line_key(KEY))
        now = clock.wall()
        for name, at in (("dead", now - in_line.LONG_GONE), ("forged", -1.0), ("well", now + TTL)):
            client.hset(keyspace.line_key(KEY), name, f"5:1:{round(at * 1000)}")
        until(lambda: set(client.hkeys(keyspace.line_key(KEY))) == {living, "well"})
        assert store.free(lease)
        until(lambda: process.heard == [KEY])


@pytest.mark.parametrize("value", ["", "x", "1", "-5:1:{now}", "1:1:-{now}", "9" * 5000, ":::", "1:2:3:4", "\udc80"])
def test_forged_number_of_copies_counts_for_nothing(store: Store, server: RedisServer, value: str) -> None:
    taken(store)
    with server.client() as client:
        text = value.replace("{now}", str(round(clock.wall() * 1000))).encode(errors="surrogateescape")
        client.hset(keyspace.line_key(KEY), "forged", text)
        assert store.inspect(KEY).waiters == 0
        client.delete(keyspace.line_key(KEY))
        client.set(keyspace.line_key(KEY), "a stranger's")
        assert store.inspect(KEY).waiters == 0


def test_number_of_copies_may_be_followed_by_what_a_later_version_adds(store: Store, server: RedisServer) -> None:
    taken(store)
    with server.client() as client:
        client.hset(keyspace.line_key(KEY), "later", f"3:1:{round(clock.wall() * 1000)}:more:[]")
        assert store.inspect(KEY).waiters == 3


def test_release_wakes_the_process(store: Store, server: RedisServer) -> None:
    lease, other = taken(store), taken(store, OTHER)
    with Process(store, one=FIRST, two=SECOND) as process:
        until(blocked(server))
        assert process.heard == []
        assert store.free(lease)
        until(lambda: process.heard == [KEY])
        assert store.free(other)
        until(lambda: process.heard == [KEY, OTHER])


def test_one_connection_is_blocked_whatever_the_number_of_locks(store: Store, server: RedisServer) -> None:
    _ = taken(store), taken(store, OTHER)
    with Process(store, one=FIRST, two=FIRST):
        until(lambda: waits(server) == waits(server, OTHER) == 1)
        until(blocked(server))


def test_lock_that_was_freed_before_wakes_the_process_at_once(store: Store, server: RedisServer) -> None:
    """Between the refusal and the copy's arrival there was nobody to wake."""
    other = taken(store, OTHER)
    with Process(store, two=FIRST) as process:
        until(blocked(server))
        process.stand(one=FIRST, two=FIRST)
        until(lambda: process.heard == [KEY])
        assert store.free(other)
        until(lambda: process.heard == [KEY, OTHER])


@pytest.mark.parametrize("free", [1, 0])
def test_semaphore_is_free_while_one_slot_is(store: Store, server: RedisServer, free: int) -> None:
    leases = [taken(store, limit=2) for _ in range(2 - free)]
    with Process(store, one=Place(1000.0, 2)) as process:
        until(blocked(server))
        until(lambda: len(process.heard) == free)
        assert store.free(leases[0])
        until(lambda: len(process.heard) == free + 1)


def test_process_with_the_older_place_is_woken(store: Store, server: RedisServer) -> None:
    """Redis wakes the client that has blocked longest, which passes the wake-up on."""
    lease = taken(store)
    with Process(store, one=SECOND) as second:
        until(blocked(server))
        with Process(store, one=FIRST) as first:
            until(blocked(server, 2))
            assert store.free(lease)
            until(lambda: first.heard == [KEY])
            assert second.heard == []
            until(lambda: first.compared == [FIRST])


def test_process_whose_first_copy_has_begun_by_itself_leaves_the_lock_to_an_older_place(
    store: Store, server: RedisServer
) -> None:
    lease = taken(store)
    with Process(store, one=FIRST) as first:
        until(blocked(server))
        with Process(store, one=SECOND) as second:
            until(blocked(server, 2))
            first.moved[KEY] = Place(3000.0, 1)
            assert store.free(lease)
            until(lambda: second.heard == [KEY])
            assert first.heard == []


@pytest.mark.parametrize("blocked_for", [0, 4, 6])
def test_oldest_of_many_processes_is_woken(store: Store, server: RedisServer, blocked_for: int) -> None:
    """However many have blocked for longer than it."""
    taken(store)
    places = [Place(1000.0 * number, 1) for number in range(2, 8)]
    places.insert(blocked_for, FIRST)
    with ExitStack() as exits:
        processes: list[Process] = []
        for place in places:
            processes.append(exits.enter_context(Process(store, one=place)))
            until(blocked(server, len(processes)))
        store.wake(KEY)
        until(lambda: any(process.heard for process in processes))
        assert [process.places[KEY] for process in processes if process.heard] == [FIRST]


def test_wake_up_takes_the_place_of_no_other(store: Store, server: RedisServer) -> None:
    """Of those for a semaphore, each is for another waiter; nobody blocks at this moment."""
    leases = [taken(store, limit=3) for _ in range(3)]
    asked = LockRequest(KEY, new_owner(), ttl=TTL, holder=Holder("waiter"), waiting=True, limit=3)
    assert isinstance(store.acquire(asked), Held)
    for lease in leases:
        assert store.free(lease)
    store.wake(KEY)
    with server.client() as client:
        assert client.llen(keyspace.wake_key(KEY)) == 3


def test_old_place_of_the_process_itself_hides_no_other(store: Store, server: RedisServer) -> None:
    """Its first copy has begun since it took that place."""
    taken(store)
    with Process(store, one=Place(3000.0, 1)) as third, server.client() as client:
        until(blocked(server))
        (own,) = client.zrange(keyspace.waiting_key(KEY), 0, -1)
        client.zadd(keyspace.waiting_key(KEY), {own: 1})
        with Process(store, one=SECOND) as second:
            until(blocked(server, 2))
            store.wake(KEY)
            until(lambda: third.heard or second.heard)
            assert (third.heard, set(second.heard)) == ([], {KEY})


def test_wake_up_that_was_given_back_goes_to_the_oldest_place(store: Store, server: RedisServer) -> None:
    taken(store)
    with Process(store, one=SECOND) as second:
        until(blocked(server))
        with Process(store, one=FIRST) as first:
            until(blocked(server, 2))
            second.wake_ups.give_back(KEY)
            until(lambda: first.heard or second.heard)
            assert (set(first.heard), second.heard) == ({KEY}, [])


def test_question_of_a_waiter_removes_no_place(store: Store, server: RedisServer) -> None:
    """However long the copies have waited."""
    _, now = taken(store), clock.wall()
    with Process(store, one=Place(now - 3600, 1)) as second:
        until(blocked(server))
        with Process(store, one=Place(now - 7200, 1)) as first:
            until(blocked(server, 2))
            asked = LockRequest(KEY, new_owner(), ttl=TTL, holder=Holder("waiter"), waiting=True)
            assert isinstance(store.acquire(asked), Held)
            assert waits(server) == 3
            store.wake(KEY)
            until(lambda: first.heard or second.heard)
            assert (set(first.heard), second.heard) == ({KEY}, [])


@pytest.mark.parametrize("is_woken", [False, True])
@pytest.mark.parametrize("replicas", [0, 1])
def test_waiter_that_leaves_keeps_no_place(server: RedisServer, replicas: int, is_woken: bool) -> None:
    """Wake-ups would be passed on to it."""
    with closing(open_url(server.url_of(0), replicas=replicas)) as store, server.client() as client:
        client.set(keyspace.run_key(KEY), "a stranger's")
        asked = LockRequest(KEY, new_owner(), ttl=TTL, holder=Holder("waiter"), waiting=True)
        assert isinstance(store.acquire(asked), Held)
        assert client.zscore(keyspace.waiting_key(KEY), asked.owner)
        with store.waiter(asked) as waiter:
            if is_woken:
                client.rpush(keyspace.wake_key(KEY), 1)
            assert isinstance(waiter.wait(0.01), Held)
        assert client.zscore(keyspace.waiting_key(KEY), asked.owner) == 0


@pytest.mark.parametrize("of_queue", [True, False])
def test_wake_up_of_followers_outlives_the_next_message(store: Store, server: RedisServer, of_queue: bool) -> None:
    """They follow the message before it, and need no lock; but a wake-up for the lock is over when it is taken."""
    key = f"{KEY}{QUEUE}" if of_queue else KEY
    lease = taken(store, key)
    with server.client() as client:
        client.zadd(keyspace.waiting_key(key), {"a process that is about to block": 1})
        assert store.free(lease)
        assert client.llen(keyspace.wake_key(key)) == 1
        taken(store, key)
        assert client.llen(keyspace.wake_key(key)) == of_queue


@pytest.mark.parametrize("by", ["a message", "a process"])
def test_wake_up_that_was_passed_on_outlives_the_next_message(store: Store, server: RedisServer, by: str) -> None:
    """It may be for a follower of the message before, which nobody would wake until the next message has ended."""
    if by == "a message":
        store.wake(KEY)
    else:
        assert store.wake_ups().pass_on(Freed(KEY, 0))
    taken(store)
    with server.client() as client:
        assert client.llen(keyspace.wake_key(KEY)) == 1


def test_older_place_of_a_dead_process_stops_nobody(store: Store, server: RedisServer) -> None:
    lease = taken(store)
    with server.client() as client:
        client.zadd(keyspace.waiting_key(KEY), {"dead": 1})
    with Process(store, one=SECOND) as process:
        until(blocked(server))
        assert store.free(lease)
        until(lambda: process.heard == [KEY])
        until(lambda: process.compared == [None])  # Any copy may begin.
        with server.client() as client:
            assert client.zscore(keyspace.waiting_key(KEY), "dead") == 0


def test_lock_that_ended_is_found_while_other_copies_come_and_go(
    store: Store, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wake_ups, "REFRESH", 0.5)
    _ = taken(store), taken(store, OTHER)
    others = cycle([{"two": FIRST}, {}])
    with Process(store, one=FIRST) as process:
        until(blocked(server))
        with server.client() as client:  # Nobody is notified.
            client.delete(keyspace.run_key(KEY))

        def heard_as_others_come() -> bool:
            process.stand(one=FIRST, **next(others))
            return KEY in process.heard

        until(heard_as_others_come)


@pytest.mark.parametrize(("in_line", "is_held"), [(True, False), (True, True), (False, False)])
def test_woken_copy_that_is_already_done_wakes_the_next(
    store: Store, server: RedisServer, in_line: bool, is_held: bool
) -> None:
    copy = Holder("done")
    store.remember(KEY, Record(copy.message, b"SUCCESS", TTL))
    lease = taken(store)
    if not is_held:
        store.free(lease)
    with server.client() as client:
        client.zadd(keyspace.waiting_key(KEY), {"next": 1})
        asked = LockRequest(KEY, new_owner(), ttl=TTL, holder=copy, once=True, in_line=in_line)
        assert isinstance(store.acquire(asked), Record)
        assert client.llen(keyspace.wake_key(KEY)) == (in_line and not is_held)


@pytest.mark.parametrize("waiting", [False, True])
@pytest.mark.parametrize(("in_line", "others"), [(True, 0), (True, 1), (False, 0)])
def test_woken_copy_of_a_message_that_runs_in_another_slot_wakes_the_next(
    store: Store, server: RedisServer, waiting: bool, in_line: bool, others: int
) -> None:
    """It takes no second slot."""
    running = taken(store, limit=2, task_id="runs")
    for _ in range(others):
        taken(store, limit=2)
    with server.client() as client:
        client.zadd(keyspace.waiting_key(KEY), {"next": 1})
        copy = LockRequest(KEY, new_owner(), ttl=TTL, holder=Holder("runs"), once=True, limit=2)
        found = store.acquire(replace(copy, in_line=in_line, waiting=waiting))
        assert isinstance(found, Held)
        assert found.owner.startswith(running.owner)
        assert client.llen(keyspace.wake_key(KEY)) == (in_line and not others)


def test_waiting_copy_of_a_message_that_runs_in_another_slot_does_not_wake_itself(
    store: Store, server: RedisServer
) -> None:
    taken(store, limit=2, task_id="runs")
    with server.client() as client:
        copy = LockRequest(KEY, new_owner(), ttl=TTL, holder=Holder("runs"), limit=2, waiting=True)
        assert isinstance(store.acquire(copy), Held)
        with store.waiter(copy) as waiter:
            store.wake(KEY)
            assert isinstance(waiter.wait(TTL), Held)
            assert client.llen(keyspace.wake_key(KEY)) == 0


def test_waiter_in_a_slot_is_woken_before_a_younger_copy(store: Store, server: RedisServer) -> None:
    lease = taken(store)
    with Process(store, one=Place(clock.wall() + 60, 1)) as process:
        until(blocked(server))
        request = LockRequest(KEY, new_owner(), ttl=TTL, holder=Holder("waiter"), waiting=True)
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


def test_unused_wake_up_goes_to_the_next_process(store: Store, server: RedisServer) -> None:
    """The process that has blocked longest has no copy left, and does not know that it is still listed."""
    lease = taken(store)
    with Process(store, one=SECOND) as process:
        until(blocked(server))
        assert process.wake_ups.pass_on(Freed(KEY))
        until(lambda: process.heard == [KEY])
        assert not process.wake_ups.pass_on(Freed(KEY, MAX_PASSED_ON))
        assert store.free(lease)
        until(lambda: process.heard == [KEY, KEY])


def test_doubt_wakes_a_process_only_if_the_lock_is_free(store: Store, server: RedisServer) -> None:
    leases = [taken(store, limit=2) for _ in "ab"]
    with Process(store, one=Place(SECOND.since, 2)) as process:
        until(blocked(server))
        process.wake_ups.wake_if_free(KEY, 2)
        with server.client() as client:
            assert client.exists(keyspace.wake_key(KEY)) == 0
        assert process.heard == []
        server.client().delete(keyspace.run_key(KEY, leases[0].slot))
        process.wake_ups.wake_if_free(KEY, 2)
        until(lambda: process.heard == [KEY])


@pytest.mark.parametrize("name", [keyspace.wake_key, keyspace.waiting_key, keyspace.line_key])
def test_foreign_value_does_not_hold_up_other_locks(
    store: Store, server: RedisServer, name: Callable[[str], str]
) -> None:
    lease = taken(store, OTHER)
    taken(store)
    with server.client() as client, Process(store, one=FIRST, two=FIRST) as process:
        until(blocked(server))
        client.delete(name(KEY))
        client.set(name(KEY), "a stranger's")
        process.stand(one=SECOND, two=FIRST)
        until(blocked(server))
        assert store.free(lease)
        until(lambda: OTHER in process.heard)
        client.delete(keyspace.run_key(KEY))
        until(lambda: KEY in process.heard)  # Once it is due for a look.
        assert process.errors == []


def test_wake_up_that_a_stranger_has_pushed_counts(store: Store, server: RedisServer) -> None:
    taken(store)
    with server.client() as client, Process(store, one=FIRST) as process:
        until(blocked(server))
        for value in ("9" * 5000, "", "nonsense", "-1"):
            many = len(process.heard)
            client.rpush(keyspace.wake_key(KEY), value)
            until(lambda many=many: len(process.heard) > many)  # type: ignore[misc]
        assert process.errors == []


def test_lock_is_looked_at_though_the_places_keep_changing(store: Store, server: RedisServer) -> None:
    """A busy process has a new first place for some lock many times a second."""
    _ = taken(store), taken(store, OTHER)
    moments = itertools.count(1)
    with server.client() as client, Process(store, one=FIRST, two=FIRST) as process:
        until(blocked(server))
        client.delete(keyspace.run_key(OTHER))

        def is_heard_of() -> bool:
            process.stand(one=Place(1000.0 + next(moments), 1), two=FIRST)
            return OTHER in process.heard

        until(is_heard_of)


def test_locks_take_turns(store: Store, server: RedisServer) -> None:
    """Redis takes the first list that has an element: a different one must come first each time."""
    _ = taken(store), taken(store, OTHER)
    heard: list[str] = []
    wake_ups = store.wake_ups()
    assert wake_ups is not None
    reader, writer = os.pipe()
    with server.client() as client:
        for key in (KEY, OTHER):
            client.rpush(keyspace.wake_key(key), *[1] * 3)
        while len(heard) < 6:
            heard += [
                freed.key for freed in wake_ups.wait({KEY: FIRST, OTHER: FIRST}, reader, one_copy, no_other_place)
            ]
    assert heard == [KEY, OTHER] * 3
    wake_ups.leave()
    os.close(reader)
    os.close(writer)


def test_lock_that_nobody_frees_is_found_free(store: Store, server: RedisServer) -> None:
    """Its holder has died, and its lease ended; or the wake-up went to a process that was killed with it."""
    taken(store)
    with Process(store, one=FIRST) as process, server.client() as client:
        until(blocked(server))
        client.delete(keyspace.run_key(KEY))
        until(lambda: process.heard)
        assert set(process.heard) == {KEY}


def test_lock_whose_wake_up_was_given_back_is_looked_at_again(store: Store, server: RedisServer) -> None:
    """Nobody else is there, and a copy comes a moment later: it finds the lock free."""
    lease = taken(store)
    with Process(store, one=FIRST) as process:
        until(blocked(server))
        assert store.free(lease)
        until(lambda: process.heard == [KEY])
        process.wake_ups.give_back(KEY)
        until(lambda: len(process.heard) > 1)


def test_process_that_left_is_not_listed_anywhere(store: Store, server: RedisServer) -> None:
    _ = taken(store), taken(store, OTHER)
    with Process(store, one=FIRST, two=FIRST) as process:
        until(blocked(server))
        process.stand(two=FIRST)
        until(lambda: waits(server) == 0)
        assert waits(server, OTHER) == 1
    assert waits(server, OTHER) == 0
    until(blocked(server, 0))


@pytest.mark.parametrize("passed_on", range(MAX_PASSED_ON + 1))
def test_process_that_leaves_passes_on_its_wake_ups(store: Store, server: RedisServer, passed_on: int) -> None:
    """However many had no use for a wake-up before, somebody else may."""
    taken(store)
    wake_ups, (reader, writer) = store.wake_ups(), os.pipe()
    assert wake_ups is not None
    with os.fdopen(reader), os.fdopen(writer, "wb", 0) as interrupts, server.client() as client:
        interrupts.write(b".")
        assert not wake_ups.wait({KEY: FIRST}, reader, one_copy, no_other_place)
        until(blocked(server))
        client.rpush(keyspace.wake_key(KEY), passed_on + 1)
        client.pexpire(keyspace.wake_key(KEY), 60_000)
        wake_ups.leave()
        expected = min(passed_on + 1, MAX_PASSED_ON) + 1
        assert client.lrange(keyspace.wake_key(KEY), 0, -1) == [str(expected)]


def test_every_key_expires(store: Store, server: RedisServer) -> None:
    lease = taken(store)
    with Process(store, one=FIRST) as process, server.client() as client:
        until(blocked(server))
        process.stand(one=SECOND)
        process.wake_ups.pass_on(Freed(OTHER))
        assert store.free(lease)
        until(lambda: process.heard == [KEY])
        assert all(client.pttl(key) > 0 for key in client.scan_iter())


def test_cut_connection_loses_no_wake_up(store: Store, server: RedisServer) -> None:
    """A lock that was freed meanwhile is found when the process takes its place again."""
    lease = taken(store)
    with Process(store, one=FIRST) as process, server.client() as client:
        until(blocked(server))
        for one in client.client_list():
            if one["cmd"] == "blpop":
                client.client_kill(one["addr"])
        assert store.free(lease)
        until(lambda: process.heard)
        assert set(process.heard) == {KEY}
        until(lambda: process.errors)


class Halves:
    """As a cluster of two servers, each with one of the locks."""

    step = 0.2

    def __init__(self, servers: Sequence[RedisServer]) -> None:
        self._parts = [Server(*of_each(parse_backend(server.url_of(0)), {})) for server in servers]

    def wake_ups(self) -> RedisWakeUps:
        return RedisWakeUps(self, "two servers")  # type: ignore[arg-type]

    def slot_of(self, key: str) -> int:
        return int("wake_ups:2" in key)

    def server_of(self, key: str) -> Server:
        return self._parts[self.slot_of(key)]

    def close(self) -> None:
        for part in self._parts:
            part.close()


def test_server_that_is_away_does_not_hold_up_the_locks_of_another(server: RedisServer) -> None:
    with (
        RedisServer() as away,
        closing(Halves([server, away])) as halves,
        closing(open_url(server.url_of(0), {})) as store,
        closing(open_url(away.url_of(0), {})) as other,
    ):
        lease, _ = taken(store), taken(other, OTHER)
        with Process(halves, one=FIRST, two=FIRST) as process:
            until(lambda: waits(server) == waits(away, OTHER) == 1)
            away.kill()
            until(lambda: process.errors)
            assert store.free(lease)
            until(lambda: process.heard == [KEY])
            many = len(process.errors)
            until(lambda: len(process.errors) > many)
            away.start()
            until(lambda: OTHER in process.heard)


def test_child_of_a_fork_does_not_keep_the_connection(store: Store, server: RedisServer) -> None:
    """Otherwise the server believes that a killed process is still blocked, and wakes it."""
    _ = taken(store)
    wake_ups = store.wake_ups()
    assert wake_ups is not None
    reader, writer = os.pipe()
    os.write(writer, b".")
    wake_ups.wait({KEY: FIRST}, reader, one_copy, no_other_place)
    until(blocked(server))
    inherited = _sockets(server)
    child = os.fork()
    if child == 0:
        os._exit(len(_sockets(server)))  # The store's idle connections are dropped when the child uses it.
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == len(inherited) - 1
    os.close(reader)
    os.close(writer)
    wake_ups.leave()


def _sockets(server: RedisServer) -> Sequence[int]:
    """Descriptors of this process that are sockets."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # The descriptor of the listing itself.
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


@pytest.mark.parametrize("url", ["memory", "redlock"])
def test_store_without_wake_ups_says_so(url: str, server: RedisServer) -> None:
    if url == "memory":
        assert MemoryStore().wake_ups() is None
        return
    with closing(open_url(";".join(map(server.url_of, range(3))), {"restart_delay": False})) as redlock:
        assert redlock.wake_ups() is None
