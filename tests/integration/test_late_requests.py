"""Requests that were given up and are carried out later: they take nothing, and free nothing of others."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from redis import Redis

from celery_singleton_lock import LockUnavailable, clock
from tests.contract import inside
from tests.contract.inside import (
    Held,
    Hold,
    Holder,
    Lease,
    LockRequest,
    Record,
    Reservation,
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

    def deliver_first(self) -> None:
        """Let the server carry out the first of them."""
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            connection.sendall(self.held.pop(0))
            connection.recv(65536)

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


def set_refusing(client: Redis, refuses: str, is_refusing: bool) -> None:
    """Have the server refuse what writes, or carry it out again."""
    if refuses == "a replica":
        client.replicaof(*(("127.0.0.1", "1") if is_refusing else ("NO", "ONE")))
    else:
        client.config_set("maxmemory", int(is_refusing))


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

    @pytest.mark.parametrize("refuses", ["a replica", "a full server"])
    def test_no_try_takes_anything_when_the_next_ones_were_refused(
        self, own_redis: RedisServer, store: Store, proxy: LateProxy, refuses: str
    ) -> None:
        """Nor has the server noted then that the first one was given up."""
        proxy.hold(1)
        with own_redis.client() as client:
            set_refusing(client, refuses, True)
            with pytest.raises(LockUnavailable):
                ask(store)
            set_refusing(client, refuses, False)
        until(lambda: is_settled(store))
        assert len(proxy.held) == 1
        proxy.deliver()
        assert store.held(KEY) == []

    def test_put_back_copy_takes_over_what_was_given_up(
        self, own_redis: RedisServer, direct: Store, store: Store
    ) -> None:
        """The server wakes up, and carries out the requests in its sockets before anything else arrives."""
        owner = new_owner()
        own_redis.pause()
        with pytest.raises(LockUnavailable):
            ask(direct, owner, holder=ME)
        own_redis.resume()
        lease = taken(store, holder=ME, given_up=[owner])
        until(lambda: is_settled(direct))
        assert store.renew([lease], timeout=1.0) == [True]
        assert [held.owner for held in store.held(KEY)] == [lease.owner]
        assert store.free(lease)
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

    def test_acquire_that_is_interrupted_at_any_line_after_its_first_answer_was_lost(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The server has carried it out: nothing of that may stay, wherever the interruption comes."""
        lines_left = 0

        def lost(run: inside.Call) -> inside.Call:
            losses = [TimeoutError()]

            def lose(*call: Any, **options: Any) -> object:
                monkeypatch.undo()
                answer = run(*call, **options)
                if not losses:
                    return answer
                sys.settrace(interrupting)
                frame = sys._getframe(1)
                while frame is not None and frame.f_code.co_filename != __file__:
                    frame.f_trace, frame = interrupting, frame.f_back
                raise losses.pop()

            return lose

        def interrupting(frame: Any, event: str, _: object) -> Any:
            nonlocal lines_left
            if not frame.f_code.co_filename.endswith(inside.QUESTION):
                return None
            if event == "line":
                lines_left -= 1
                if lines_left == 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return interrupting

        is_over, line = False, 0
        while not is_over:
            line += 1
            lines_left = line
            inside.calls_through(monkeypatch, store, lost)
            try:
                lease = taken(store)
                is_over = True
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            if is_over:
                store.free(lease)
            until(lambda: is_settled(store))
            assert store.held(KEY) == [], f"at line {line}"
        assert line > 10


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

    def test_keeps_the_lock_for_its_heir(self, store: Store, proxy: LateProxy) -> None:
        lease, following = taken(store, holder=ME), replace(ME, retries=2)
        proxy.hold(3)
        with pytest.raises(LockUnavailable):
            store.free(lease, reservation=Reservation(following, TTL))
        until(lambda: is_settled(store))
        (kept,) = store.held(KEY)
        assert kept.holder == following
        assert kept.remaining <= TTL
        heir = taken(store, holder=following)
        store.free(heir, record=Record(following.message, b"record", 60.0))
        proxy.deliver()
        assert store.held(KEY) == [], "a late release keeps nothing for an heir that has come"

    def test_is_complete_where_nobody_can_be_woken(self, own_redis: RedisServer, direct: Store) -> None:
        """A foreign value is at the key for wake-ups: the release must not be repeated over and over because of it."""
        lease = taken(direct, holder=ME)
        with own_redis.client() as client:
            client.zadd(inside.waiting_set(KEY), {"waiter": 1})
            client.set(inside.asked_hash(KEY), "a stranger's")
        assert direct.free(lease, record=Record(ME.message, b"record", 60.0))
        assert is_settled(direct)
        assert direct.held(KEY) == []

    def test_comes_before_the_record_that_replaces_its_own(
        self, own_redis: RedisServer, direct: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease, record = taken(direct, holder=ME), Record(ME.message, b"record", 60.0)
        inside.repeat_nothing(monkeypatch, direct)
        own_redis.pause()
        with pytest.raises(LockUnavailable):
            direct.free(lease, record=record)
        own_redis.resume()
        own_redis.client().ping()
        direct.replace_records([(KEY, record._replace(content=b"settled"))])
        assert [record.content for record in direct.inspect(KEY).records] == [b"settled"]
        assert inside.owed(direct) == []

    def test_is_repeated_if_it_was_interrupted_before_it_was_sent(
        self, direct: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A soft time limit may strike there."""
        lease, record = taken(direct, holder=ME), Record(ME.message, b"record", 60.0)

        def interrupted(*_: object, **__: object) -> None:
            patch.undo()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            inside.interrupt_release(patch, interrupted)
            with pytest.raises(KeyboardInterrupt):
                direct.free(lease, record=record)
        until(lambda: is_settled(direct))
        assert direct.held(KEY) == []
        assert [record.content for record in direct.inspect(KEY).records] == [b"record"]


class TestAge:
    """A copy of the message sees from the remaining time of a record how long ago the body ended."""

    @pytest.fixture
    def pass_time(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
        now = clock.now
        return lambda seconds: monkeypatch.setattr(clock, "now", lambda: now() + seconds)

    @pytest.mark.parametrize("way", ["free", "remember"])
    @pytest.mark.parametrize("arrives", [True, False])
    def test_record_that_is_written_late_expires_on_time(
        self,
        store: Store,
        direct: Store,
        proxy: LateProxy,
        pass_time: Callable[[float], None],
        way: str,
        arrives: bool,
    ) -> None:
        lease, record = taken(store, holder=ME), Record(ME.message, b"record", 60.0)
        proxy.hold(1000)
        if way == "free":
            with pytest.raises(LockUnavailable):
                store.free(lease, record=record)
        else:
            store.remember(KEY, record)
        pass_time(20.0)
        if arrives:
            began = clock.now()
            proxy.deliver_first()
            (left,) = direct.inspect(KEY).records
            assert 59 - (clock.now() - began) < left.seconds <= 60, "it lay before the server"
        proxy.hold(0)
        until(lambda: is_settled(store))
        (left,) = store.inspect(KEY).records
        assert left.content == record.content
        assert 35 < left.seconds <= 40


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

    def test_are_bounded_in_number(
        self, own_redis: RedisServer, direct: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        inside.set_number(monkeypatch, "items that wait at most", 10)
        own_redis.pause()
        leases = [Lease(f"{KEY}:{number}", new_owner(), ttl=TTL, fence=0, sent_at=0.0) for number in range(30)]
        for lease in leases:
            inside.owe(direct, inside.command("abandon", lease), owner=lease.owner)
        assert inside.owed(direct) == [lease.owner for lease in leases[-10:]]
        own_redis.resume()
        until(lambda: is_settled(direct))

    def test_call_that_the_server_refuses_does_not_delay_the_rest(self, own_redis: RedisServer, direct: Store) -> None:
        lease = taken(direct)
        with own_redis.client() as client:
            client.set("late:{text}:waiting", "text")
            client.set("late:{text}:run", "x" * 32)
        stranger = Hold("late:{text}", "x" * 32, ttl=1)
        inside.owe(direct, inside.command("abandon", stranger))
        inside.owe(direct, inside.command("abandon", lease))
        until(lambda: direct.held(KEY) == [])


class TestFences:
    def test_grow_over_a_restart_with_older_data(self, own_redis: RedisServer, direct: Store) -> None:
        with own_redis.client() as client:
            direct.free(taken(direct))
            client.save()
        fences = []
        for _ in range(3):
            for _ in range(20):
                lease = taken(direct)
                fences.append(lease.fence)
                direct.free(lease)
            own_redis.restart()
        assert fences == sorted(set(fences))
        assert fences[-1] < 2**53

    def test_grow_beyond_a_clock_that_is_behind(self, own_redis: RedisServer, direct: Store) -> None:
        with own_redis.client() as client:
            client.set(FENCE, 2**52)
            lease = taken(direct)
            assert lease.fence == 2**52 + 1
            assert client.get(FENCE) == str(2**52 + 1)

    def test_error_names_the_right_that_a_user_needs(self, own_redis: RedisServer, direct: Store) -> None:
        with own_redis.client() as client:
            client.acl_setuser("default", enabled=True, commands=["-time"])
        with pytest.raises(LockUnavailable, match="needs the right \\+time"):
            taken(direct)


def test_commands_that_have_not_reached_the_server_are_dropped(own_redis: RedisServer) -> None:
    """After the connection is closed, the kernel would go on sending them, even after minutes without a network."""
    connection = inside.server_at(own_redis.port).open()
    connection.send(("CLIENT", "REPLY", "OFF"))  # Otherwise the answers would end the connection.
    own_redis.pause()
    for _ in range(20):
        connection.send(("SET", "filler", "x" * 100_000))  # The server reads 16 kB of it at a time.
    connection.send(("SET", "ghost", 1))
    connection.close()
    own_redis.resume()
    with own_redis.client() as client:
        until(lambda: client.info("clients")["connected_clients"] == 1)
        assert not client.exists("ghost")
