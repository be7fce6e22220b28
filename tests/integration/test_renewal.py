"""Renewal, as the holder of a `Lock` sees it: a lease lasts, or its holder knows before others can have the lock."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from redis import Redis

from celery_singleton_lock import Lock, clock
from celery_singleton_lock.lock import NotOwned
from tests.integration.outside import NAME, RENEWED, client
from tests.patience import LIMIT, until
from tests.proxy import LossyProxy
from tests.redis_server import RedisServer

__all__ = ["client"]

#: Seconds of a lease that is lost: a third of it is left then, which is longer than a busy machine stops a thread for.
LOST = 6.0


@pytest.fixture
def proxy(own_redis: RedisServer) -> Iterator[LossyProxy]:
    with LossyProxy(own_redis.port) as proxy:
        yield proxy


class Holder:
    """Holds a lock, and notes what the server still has as it is told of the loss."""

    def __init__(self, port: int, watching: Redis, name: str = NAME, timeout: float = LOST) -> None:
        self.lost = threading.Event()
        self.left: list[int] = []
        self._watching = watching
        self.lock = Lock(Redis(port=port), name, timeout=timeout, on_lost=self._note)
        assert self.lock.acquire()

    def _note(self, lock: Lock) -> None:
        # Of this lock alone: the others of a test have longer names.
        self.left.append(self._watching.pttl(lock.name))
        self.lost.set()

    def outlives(self, seconds: float) -> None:
        """Some renewals, at least one of them after the first lease."""
        end = clock.now() + seconds
        while clock.now() < end:
            clock.sleep(0.1)
            self.lock.check()
        self.lock.release()


def hold_back(proxy: LossyProxy, server: RedisServer) -> None:
    proxy.hold(commands=True)


def drop_answers(proxy: LossyProxy, server: RedisServer) -> None:
    proxy.hold(replies=True)


def refuse(proxy: LossyProxy, server: RedisServer) -> None:
    proxy.__exit__()


def forget(proxy: LossyProxy, server: RedisServer) -> None:
    proxy.forsake()
    proxy.hold(replies=True)


@pytest.mark.parametrize("fall_silent", [hold_back, drop_answers, refuse, forget])
def test_holder_knows_before_others_can_have_the_lock(
    own_redis: RedisServer, client: Redis, proxy: LossyProxy, fall_silent: Callable[[LossyProxy, RedisServer], None]
) -> None:
    holder = Holder(proxy.port, client)
    fall_silent(proxy, own_redis)
    assert holder.lost.wait(LIMIT)
    assert holder.left[0] > 0
    with pytest.raises(NotOwned):
        holder.lock.check()


def test_holder_knows_in_time_though_a_name_is_looked_up_for_ever(
    client: Redis, proxy: LossyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No deadline bounds that; and the thread that renews waits for it, for a lock with another ttl as well."""
    goes_on, look_up = threading.Event(), socket.getaddrinfo

    def hangs(host: str, port: int, *asked: Any) -> Any:
        assert port != proxy.port or goes_on.wait(LIMIT)
        return look_up(host, port, *asked)

    holder, long = Holder(proxy.port, client), Holder(proxy.port, client, f"{NAME} 2", timeout=20 * LIMIT)
    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    proxy.cut()
    assert holder.lost.wait(LIMIT)
    assert holder.left[0] > 0
    long.lock.check()
    goes_on.set()
    long.lock.release()


def test_answers_that_are_missing_for_a_while_harm_nobody(client: Redis, proxy: LossyProxy) -> None:
    holder = Holder(proxy.port, client, timeout=2 * RENEWED)
    proxy.lose(2)
    until(lambda: proxy.lost == 2)
    holder.outlives(2 * RENEWED)
    assert holder.left == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_error_of_one_holder_harms_no_other(own_redis: RedisServer, client: Redis) -> None:
    told = threading.Event()

    def fail(lock: Lock) -> None:
        told.set()
        raise RuntimeError("told wrong")

    bad = Lock(client, f"{NAME} 2", timeout=RENEWED, on_lost=fail)
    assert bad.acquire()
    good = Holder(own_redis.port, client, timeout=RENEWED)
    client.delete(bad.name)
    assert told.wait(LIMIT)
    good.outlives(RENEWED + 1.0)
    assert good.left == []


def test_lock_that_nobody_refers_to_any_more_is_free(client: Redis) -> None:
    """No `release` was called; it must not be renewed for ever."""
    lock = Lock(client, NAME, timeout=RENEWED)
    assert lock.acquire()
    del lock
    gc.collect()
    until(lambda: Lock(client, NAME).acquire(blocking=False))


def in_child(body: Callable[[], bool]) -> int:
    """The pid of a fork that says by its status whether it is true."""
    pid = os.fork()
    if pid == 0:
        status = 2
        with suppress(BaseException):
            status = 0 if body() else 1
        os._exit(status)
    return pid


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_child_of_a_fork_renews_its_own(own_redis: RedisServer, client: Redis) -> None:
    """Whatever its parent's threads did at that moment."""
    going = Holder(own_redis.port, client, timeout=RENEWED)

    def body() -> bool:
        mine = Holder(own_redis.port, client, f"{NAME} of the child", timeout=RENEWED)
        mine.outlives(RENEWED + 1.0)
        return mine.left == []

    assert status_of(in_child(body)) == 0
    going.outlives(0.0)


def test_stopped_process_does_not_believe_that_it_has_the_lock(own_redis: RedisServer, client: Redis) -> None:
    """It goes on when another has had the lock for long: its first check fails, before a renewal was answered."""
    reader, writer = os.pipe()

    def body() -> bool:
        lock = Lock(Redis(port=own_redis.port), NAME, timeout=1)
        assert lock.acquire()
        os.write(writer, b".")
        try:
            while True:
                lock.check()
                before = clock.now()
                os.kill(os.getpid(), signal.SIGSTOP)
                assert clock.now() - before > 1.0
        except NotOwned:
            return True

    child = in_child(body)
    os.read(reader, 1)
    os.waitpid(child, os.WUNTRACED)
    other = Lock(client, NAME)
    assert other.acquire(blocking_timeout=LIMIT)
    os.kill(child, signal.SIGCONT)
    assert status_of(child) == 0
    other.release()
    os.close(reader)
    os.close(writer)
