"""Renewal, as the holder of a `Lock` sees it: a lease lasts, or its holder knows before others can have the lock."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from redis import CredentialProvider, Redis, RedisError

from celery_singleton_lock import Lock, clock
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.lock import NotOwned, Unavailable
from tests.integration.outside import NAME, RENEWED, client
from tests.patience import LIMIT, until
from tests.proxy import LossyProxy
from tests.redis_server import RedisServer

__all__ = ["client"]

#: Locks of one process.
MANY = 500

#: Seconds of a lease that is lost: a third of it is left then, which is longer than a busy machine stops a thread for.
LOST = 6.0


@pytest.fixture
def proxy(own_redis: RedisServer) -> Iterator[LossyProxy]:
    with LossyProxy(own_redis.port) as proxy:
        yield proxy


class Holder:
    """Holds a lock, and notes what the server still has as it is told of the loss."""

    def __init__(self, port: int, watching: Redis, name: str = NAME, timeout: float = LOST, **connection: Any) -> None:
        self.lost = threading.Event()
        self.left: list[int] = []
        self._watching = watching
        client = Redis(port=port, **connection)
        self.lock = Lock(client, name, timeout=timeout, thread_local=False, on_lost=self._note)
        assert self.lock.acquire()

    def _note(self, lock: Lock) -> None:
        with suppress(RedisError):  # The test is over, and its server gone.
            # Of this lock alone: the others of a test have longer names.
            self.left.append(self._watching.pttl(lock.name))
            self.lost.set()

    def outlives(self, seconds: float) -> None:
        end = clock.now() + seconds
        while clock.now() < end:
            clock.sleep(0.1)
            self.lock.check()
        self.lock.release()


def hold_back(proxy: LossyProxy, server: RedisServer) -> None:
    proxy.hold(commands=True)


def refuse(proxy: LossyProxy, server: RedisServer) -> None:
    proxy.__exit__()


def forget(proxy: LossyProxy, server: RedisServer) -> None:
    proxy.forsake()
    proxy.hold(replies=True)


@pytest.mark.parametrize("silent", [1, 8])
def test_holder_knows_in_time_though_a_name_is_looked_up_for_ever(
    own_redis: RedisServer, client: Redis, proxy: LossyProxy, monkeypatch: pytest.MonkeyPatch, silent: int
) -> None:
    """No deadline bounds that. Whoever renews the locks of one server waits for it, and so does who changes a time."""
    goes_on, look_up = threading.Event(), socket.getaddrinfo

    def hangs(host: str, port: int, *asked: Any) -> Any:
        assert port != proxy.port or goes_on.wait(LIMIT)
        return look_up(host, port, *asked)

    # Of connections with different names, each of which is renewed by itself.
    holders = [Holder(proxy.port, client, f"{NAME} {number}", client_name=f"{number}") for number in range(silent)]
    changed = Holder(proxy.port, client, f"{NAME} changed")
    long = Holder(proxy.port, client, f"{NAME} long", timeout=20 * LIMIT)
    going = Holder(own_redis.port, client, timeout=RENEWED)
    monkeypatch.setattr(socket, "getaddrinfo", hangs)
    proxy.cut()
    change = threading.Thread(target=suppressed(lambda: changed.lock.extend(20 * LIMIT)))
    change.start()
    for holder in (*holders, changed):
        assert holder.lost.wait(LIMIT)
        assert holder.left[0] > 0
    long.lock.check()
    going.outlives(RENEWED + 1.0)
    assert going.left == []
    goes_on.set()
    change.join(LIMIT)
    assert changed.lock.lost
    long.lock.release()


def suppressed(use: Callable[[], object]) -> Callable[[], None]:
    def used() -> None:
        with suppress(NotOwned, Unavailable):
            use()

    return used


class Vault(CredentialProvider):
    """Has the password of the server, unless it is closed: then it raises an error that no other code knows."""

    def __init__(self) -> None:
        self.is_closed = False
        self.refused = threading.Event()

    def get_credentials(self) -> tuple[str, str]:
        if self.is_closed:
            self.refused.set()
            raise KeyError("no such secret")
        return "default", "any"


@pytest.mark.parametrize("opens_again", [True, False])
def test_error_of_the_programs_own_code_is_a_missing_answer(
    own_redis: RedisServer, client: Redis, proxy: LossyProxy, opens_again: bool
) -> None:
    vault = Vault()
    holder, going = Holder(proxy.port, client, credential_provider=vault), Holder(own_redis.port, client, f"{NAME} 2")
    vault.is_closed = True
    proxy.cut()
    assert vault.refused.wait(LIMIT)
    vault.is_closed = not opens_again
    if opens_again:
        holder.outlives(LOST)
        assert holder.left == []
    else:
        assert holder.lost.wait(LIMIT)
        assert holder.left[0] > 0
    going.lock.check()
    going.lock.release()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("hangs", [False, True])
def test_error_of_one_holder_harms_no_other(own_redis: RedisServer, client: Redis, hangs: bool) -> None:
    told, goes_on = threading.Event(), threading.Event()

    def fail(lock: Lock) -> None:
        told.set()
        if hangs:
            goes_on.wait(LIMIT)
        raise RuntimeError("told wrong")

    bad = Lock(client, f"{NAME} 2", timeout=RENEWED, on_lost=fail)
    assert bad.acquire()
    good = Holder(own_redis.port, client, timeout=RENEWED)
    client.delete(bad.name)
    assert told.wait(LIMIT)
    good.outlives(RENEWED + 1.0)
    assert good.left == []
    goes_on.set()


def in_child(body: Callable[[], bool]) -> int:
    """The pid of a fork that says by its status whether it is true."""
    pid = os.fork()
    if pid == 0:
        status = 2
        signal.alarm(60)  # Kills one that hangs.
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


def sleep_for(seconds: float) -> None:
    """What the clock of this process says after it, or its host, was suspended: of a child, which ends with it."""
    now = clock.now
    clock.now = lambda: now() + seconds


@pytest.mark.parametrize("answers", [True, False])
def test_process_that_slept_asks_whether_its_lock_is_still_held(
    own_redis: RedisServer, client: Redis, answers: bool
) -> None:
    def body() -> bool:
        lock = Lock(Redis(port=own_redis.port), NAME, timeout=600)
        assert lock.acquire()
        if not answers and own_redis.pid is not None:
            os.kill(own_redis.pid, signal.SIGSTOP)
        sleep_for(700.0)
        try:
            lock.check()
        except NotOwned:
            return not answers
        return answers

    child = in_child(body)
    try:
        assert status_of(child) == 0
    finally:
        own_redis.resume()


def test_lock_that_is_still_there_after_a_sleep_is_not_given_up(own_redis: RedisServer, client: Redis) -> None:
    def body() -> bool:
        told = threading.Event()
        lock = Lock(Redis(port=own_redis.port), NAME, timeout=600, on_lost=lambda _: told.set())
        assert lock.acquire()
        sleep_for(700.0)
        until(lambda: not lock.lost, "it is renewed")
        return not told.is_set()

    assert status_of(in_child(body)) == 0


@pytest.mark.parametrize("reading", range(1, 4))
def test_lease_is_not_trusted_for_longer_than_it_asks_for(client: Redis, reading: int) -> None:
    """Another thread gives it a shorter ttl while its renewal is made."""

    class Shortened(Lease):
        """Its ttl is the shorter one from the given reading on."""

        left = reading

        @property
        def ttl(self) -> float:
            self.left -= 1
            return LOST if self.left < 0 else 100 * LOST

        @ttl.setter
        def ttl(self, ttl: float) -> None: ...

    lock = Lock(client, NAME, timeout=LOST, renew=False)
    assert lock.acquire()
    lease = Shortened(lock.local.lease.key, lock.local.lease.owner, ttl=LOST, fence=1, sent_at=clock.now())
    lease.left, lease.trusted_until, lease.only_longer = reading, clock.now(), True
    assert lock._heartbeat.store.renew([lease], timeout=LIMIT) == [True]
    assert lease.trusted_until <= clock.now() + client.pttl(NAME) / 1000
    lock.release()


def test_late_renewal_does_not_shorten_what_extend_has_made_longer(client: Redis) -> None:
    lock = Lock(client, NAME, timeout=LOST)
    assert lock.acquire()
    lease = lock.local.lease
    assert lease is not None
    late = Hold(lease.key, lease.owner, ttl=lease.ttl, only_longer=lease.only_longer)  # As it is now.
    lock.extend(100 * LOST)
    assert lock._heartbeat.store.renew([late], timeout=LIMIT) == [True]
    assert client.pttl(NAME) / 1000 > 50 * LOST
    lock.release()
