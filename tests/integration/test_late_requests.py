"""Requests that were given up and are carried out later: they take nothing, and free nothing of others."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from celery_singleton_lock import LockUnavailable
from tests.contract import inside
from tests.contract.inside import (
    Held,
    Holder,
    Lease,
    LockRequest,
    Record,
    Store,
    is_settled,
    new_owner,
    open_url,
)
from tests.integration.conftest import until
from tests.proxy import LossyProxy
from tests.redis_server import RedisServer

KEY = "late:{job:1}"

#: The highest fence given out for this key and others.
FENCE = inside.fence_counter(KEY)
ME = Holder("my-task", 1, "worker@host", 42, 1000.0)
OTHER = Holder("other", 0, "elsewhere", 7, 1.0)

#: Seconds: longer than any test, so that a lock is free only if it was freed.
TTL = 300.0


class LateProxy(LossyProxy):
    """Holds the next requests back, and cuts their connections; `deliver` sends them at last."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._to_hold = 0
        self.held: list[bytes] = []
        super().__init__(port)

    def hold(self, requests: int) -> None:
        self._to_hold = requests

    def deliver(self) -> list[bytes]:
        """Send them; returns the server's answers."""
        answers = []
        for request in self.held:
            with socket.create_connection(("127.0.0.1", self._port)) as connection:
                connection.sendall(request)
                answers.append(connection.recv(65536))
        self.held.clear()
        return answers

    def _forward(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        if is_reply:
            super()._forward(source, sink, is_reply)
            return
        with suppress(OSError):
            while data := source.recv(65536):
                if self._to_hold > 0 and b"BLPOP" not in data:  # Waiting for news asks for nothing.
                    self._to_hold -= 1
                    self.held.append(data)
                    break
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(own_redis: RedisServer) -> Iterator[LateProxy]:
    with LateProxy(own_redis.port) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: LateProxy) -> Iterator[Store]:
    """A store behind the proxy; the server already knows the scripts."""
    store = open_url(f"redis://127.0.0.1:{proxy.port}/0")
    store.free(taken(store))
    yield store
    proxy.hold(0)
    store.close()


@pytest.fixture
def direct(own_redis: RedisServer) -> Iterator[Store]:
    """A store that reaches the server without the proxy."""
    store = open_url(own_redis.url)
    yield store
    store.close()


def ask(store: Store, owner: str = "", **more: object) -> Lease | Held | Record:
    return store.acquire(LockRequest(KEY, owner or new_owner(), **{"ttl": TTL, "holder": OTHER, **more}))  # type: ignore[arg-type]


def taken(store: Store, owner: str = "", **more: object) -> Lease:
    lease = ask(store, owner, **more)
    assert isinstance(lease, Lease)
    return lease


class TestAcquire:
    def test_first_try_takes_nothing_after_the_second_one_was_released(self, store: Store, proxy: LateProxy) -> None:
        proxy.hold(1)
        lease = taken(store)
        assert store.free(lease)
        assert len(proxy.held) == 1
        proxy.deliver()
        assert store.held(KEY) == []

    def test_no_try_takes_anything_when_all_were_given_up(self, store: Store, proxy: LateProxy) -> None:
        proxy.hold(3)
        with pytest.raises(LockUnavailable):
            ask(store, holder=ME)
        until(lambda: is_settled(store))
        assert len(proxy.held) == 3
        proxy.deliver()
        assert store.held(KEY) == []

    def test_lock_that_was_granted_too_late_is_given_back(self, own_redis: RedisServer, proxy: LateProxy) -> None:
        """Answers take longer than a third of the ttl."""
        slow = open_url(f"redis://127.0.0.1:{proxy.port}/0")
        slow.free(taken(slow))
        proxy.delay(0.3)
        with pytest.raises(LockUnavailable, match="third of the ttl"):
            ask(slow, ttl=0.6)
        until(lambda: is_settled(slow))
        proxy.delay(0.0)
        assert slow.held(KEY) == []
        slow.close()


class TestAbandon:
    def test_never_raises_and_is_repeated(self, own_redis: RedisServer, direct: Store) -> None:
        lease = taken(direct)
        own_redis.pause()
        assert direct.abandon(lease) is None
        assert direct.abandon(lease) is None
        own_redis.resume()
        until(lambda: direct.held(KEY) == [])
        until(lambda: is_settled(direct))

    def test_server_that_is_gone_and_comes_back(self, own_redis: RedisServer, direct: Store) -> None:
        lease = taken(direct)
        with own_redis.client() as client:
            client.save()
        own_redis.kill()
        assert direct.abandon(lease) is None
        own_redis.start()
        until(lambda: is_settled(direct))
        assert direct.held(KEY) == []


class TestLeave:
    """The main process writes the records of killed children: it must not wait for each of them."""

    def test_waits_once_for_a_server_that_is_silent(
        self, own_redis: RedisServer, direct: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease, asked = taken(direct), []

        def noted(run: inside.Call) -> inside.Call:
            return lambda call: asked.append(call) or run(call)

        inside.calls_through(monkeypatch, direct, noted)
        own_redis.pause()
        for number in range(5):
            direct.remember(KEY, Record(f"message {number}", b"killed", 60.0))
            direct.abandon(lease)
        assert len(asked) == 1
        own_redis.resume()
        until(lambda: is_settled(direct))
        assert len(direct.inspect(KEY).records) == 5
        assert direct.held(KEY) == []


@pytest.fixture
def hold_back_release(store: Store, proxy: LateProxy, monkeypatch: pytest.MonkeyPatch) -> Callable[[Lease], None]:
    """Holds a release back, with the record of its message's end; no thread repeats it."""

    def hold_back(lease: Lease) -> None:
        inside.repeat_nothing(monkeypatch, store)
        proxy.hold(3)
        with pytest.raises(LockUnavailable):
            store.free(lease, record=Record(ME.message, b"record", 60.0))

    return hold_back


class TestRelease:
    def test_is_carried_out_before_the_next_question(
        self, store: Store, hold_back_release: Callable[[Lease], None]
    ) -> None:
        """A copy of the message may ask as soon as the server answers again, and must find how it has ended."""
        hold_back_release(taken(store, holder=ME))
        request = LockRequest(KEY, new_owner(), ttl=TTL, holder=ME, check_finished=True)
        found = store.acquire(request)
        assert isinstance(found, Record)
        assert found.content == b"record"
        assert is_settled(store)

    def test_can_be_repeated_by_the_caller(self, own_redis: RedisServer, direct: Store) -> None:
        lease = taken(direct)
        own_redis.pause()
        with pytest.raises(LockUnavailable):
            direct.free(lease)
        own_redis.resume()
        until(lambda: is_settled(direct))
        assert direct.free(lease), "the first one worked"

    def test_late_request_frees_nothing_of_the_next_holder(self, store: Store, proxy: LateProxy) -> None:
        lease = taken(store)
        proxy.hold(3)
        with pytest.raises(LockUnavailable):
            store.free(lease)
        until(lambda: is_settled(store))
        other = taken(store, holder=ME)
        proxy.deliver()
        assert store.renew([other], timeout=1.0) == [True]

    def test_is_complete_where_nobody_can_be_woken(self, own_redis: RedisServer, direct: Store) -> None:
        """A foreign value is at the key for wake-ups: the release must not be repeated over and over because of it."""
        lease = taken(direct, holder=ME)
        with own_redis.client() as client:
            client.zadd(inside.waiting_set(KEY), {"waiter": 1})
            client.set(inside.asked_hash(KEY), "a stranger's")
        assert direct.free(lease, record=Record(ME.message, b"record", 60.0))
        assert is_settled(direct)
        assert direct.held(KEY) == []

    def test_comes_before_the_record_that_replaces_its_own(self, own_redis: RedisServer, direct: Store) -> None:
        lease, record = taken(direct, holder=ME), Record(ME.message, b"record", 60.0)
        own_redis.pause()
        with pytest.raises(LockUnavailable):
            direct.free(lease, record=record)
        own_redis.resume()
        own_redis.client().ping()
        direct.replace_records([(KEY, record._replace(content=b"settled"))])
        until(lambda: is_settled(direct))
        assert [record.content for record in direct.inspect(KEY).records] == [b"settled"]


class TestDebts:
    def test_child_of_a_fork_owes_nothing(self, own_redis: RedisServer, direct: Store) -> None:
        lease = taken(direct)
        own_redis.pause()
        direct.abandon(lease)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if is_settled(direct) and not inside.repeating_threads(direct) else 1)
        own_redis.resume()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        until(lambda: is_settled(direct))
        assert direct.held(KEY) == []


class TestFences:
    def test_error_names_the_right_that_a_user_needs(self, own_redis: RedisServer, direct: Store) -> None:
        with own_redis.client() as client:
            client.acl_setuser("default", enabled=True, commands=["-time"])
        with pytest.raises(LockUnavailable, match="needs the right \\+time"):
            taken(direct)


def test_commands_that_have_not_reached_the_server_are_dropped(own_redis: RedisServer) -> None:
    """After the connection is closed, the kernel would go on sending them, even after minutes without a network."""
    connection = inside.server_at(own_redis.port).open()
    inside.tell(connection, "CLIENT", "REPLY", "OFF")  # Otherwise the answers would end the connection.
    own_redis.pause()
    for _ in range(20):
        inside.tell(connection, "SET", "filler", "x" * 100_000)  # The server reads 16 kB of it at a time.
    inside.tell(connection, "SET", "ghost", 1)
    connection.close()
    own_redis.resume()
    with own_redis.client() as client:
        until(lambda: client.info("clients")["connected_clients"] == 1)
        assert not client.exists("ghost")
