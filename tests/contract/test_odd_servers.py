"""A server with odd answers, one that was replaced, connections that a network has forgotten: nobody believes what no
server has said, and the next call finds the server that there is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import TypeVar

import pytest

from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import Held, LockRequest, Record
from celery_singleton_lock.stores.store import Store
from tests.contract import inside
from tests.contract.conftest import opened
from tests.contract.forging import ForgingProxy
from tests.patience import until
from tests.proxy import KINDS
from tests.redis_server import RedisServer

Answer = TypeVar("Answer")

KEY = "contract:{odd:1}"
ME = Holder("me")
RECORD = Record(ME.message, b"record", 60.0)

#: Seconds: longer than any test.
TTL = 300.0

#: In a script's call, and in anything that is asked about the lock.
SCRIPT, ANYTHING = b"EVAL", KEY.encode()

REFUSALS = (b"-READONLY It is a replica\r\n", b"-MASTERDOWN Link is down\r\n", b"-NOREPLICAS Not enough of them\r\n")


@pytest.fixture(params=[1, 3])
def nodes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def proxies(redis_server: RedisServer, nodes: int) -> Iterator[Sequence[ForgingProxy]]:
    """Before one server, or before the nodes of a Redlock."""
    proxies = [ForgingProxy(redis_server.port) for _ in range(nodes)]
    yield proxies
    for proxy in proxies:
        proxy.__exit__()


@pytest.fixture
def store(proxies: Sequence[ForgingProxy]) -> Iterator[Store]:
    urls = [f"redis://127.0.0.1:{proxy.port}/{number}" for number, proxy in enumerate(proxies)]
    with closing(open_url(";".join(urls), {"restart_delay": False})) as store:
        yield store


@pytest.fixture
def direct(redis_server: RedisServer, nodes: int) -> Iterator[Store]:
    """Another process, which reaches the servers."""
    with opened(redis_server, nodes) as store:
        yield store


def asked(holder: Holder = ME) -> LockRequest:
    return LockRequest(KEY, new_owner(), ttl=TTL, holder=holder)


def taken(store: Store) -> Lease:
    lease = store.acquire(asked())
    assert isinstance(lease, Lease)
    return lease


class TestInvalidAnswers:
    """They are errors, whatever is asked."""

    @pytest.fixture(params=[b"+OK\r\n", b"$-1\r\n", b"*0\r\n", b"*1\r\n:99\r\n", b"*2\r\n*1\r\n:1\r\n:1\r\n"], ids=repr)
    def answer(self, request: pytest.FixtureRequest) -> bytes:
        return bytes(request.param)

    def forge(self, proxies: Sequence[ForgingProxy], answer: bytes) -> None:
        for proxy in proxies:
            proxy.forge(SCRIPT, answer)

    def test_no_lease(self, store: Store, direct: Store, proxies: Sequence[ForgingProxy], answer: bytes) -> None:
        def why_not() -> str:
            with pytest.raises(LockUnavailable) as refused:
                store.acquire(asked())
            return str(refused.value)

        self.forge(proxies, answer)
        # On a busy machine, a Redlock may not hear any answer in time.
        until(lambda: "is not an answer to" in why_not(), "an answer is refused")
        for proxy in proxies:
            proxy.be_honest()
        # Nor then: a node may have been asked late, and is asked to undo that.
        until(lambda: isinstance(direct.acquire(asked()), Lease), "nothing is held")

    def test_nothing_is_renewed(self, store: Store, proxies: Sequence[ForgingProxy], answer: bytes) -> None:
        lease, other = taken(store), Hold(f"{KEY}2", new_owner(), ttl=TTL)
        end = lease.trusted_until
        self.forge(proxies, answer)
        with pytest.raises(LockUnavailable):
            store.renew([lease, other], timeout=1.0)
        assert lease.trusted_until == end

    def test_too_few_answers_renew_nothing(self, store: Store, proxies: Sequence[ForgingProxy]) -> None:
        lease, other = taken(store), Hold(f"{KEY}2", new_owner(), ttl=TTL)
        end = lease.trusted_until
        self.forge(proxies, b"*1\r\n:1\r\n")
        with pytest.raises(LockUnavailable):
            store.renew([lease, other], timeout=1.0)
        assert lease.trusted_until == end

    def test_nothing_is_freed_or_refused(
        self, store: Store, direct: Store, proxies: Sequence[ForgingProxy], answer: bytes
    ) -> None:
        lease = taken(store)
        self.forge(proxies, answer)
        with pytest.raises(LockUnavailable):
            store.refuse(KEY, Holder("other"), Record(Holder("other").message, b"refused", 60.0))
        with suppress(LockUnavailable):
            assert not store.free(lease)
        for proxy in proxies:
            proxy.be_honest()
        until(lambda: direct.held(KEY) == [], "the end is said again")


@pytest.mark.parametrize("error", [b"MOVED x", b"ASK", b"MOVED 5 nowhere", b"NOPERM no", b"ERR no"])
def test_error_is_no_answer(store: Store, proxies: Sequence[ForgingProxy], error: bytes) -> None:
    for proxy in proxies:
        proxy.forge(ANYTHING, b"-%b\r\n" % error)
    with pytest.raises(LockUnavailable):
        store.acquire(asked())
    for look in (store.held, store.inspect):
        with pytest.raises(LockUnavailable):
            look(KEY)


def test_surplus_answer_is_not_taken_for_the_next_one(
    store: Store, direct: Store, proxies: Sequence[ForgingProxy]
) -> None:
    granted = b"*3\r\n:1\r\n:7\r\n:0\r\n"
    lease = taken(store)
    for proxy in proxies:
        proxy.forge(SCRIPT, b":1\r\n" + 3 * granted)
    with suppress(LockUnavailable):
        store.free(lease)
    for proxy in proxies:
        proxy.be_honest()
    assert direct.free(lease)
    other = taken(direct)
    assert not isinstance(store.acquire(asked(Holder("other"))), Lease)
    assert direct.renew([other], timeout=5.0) == [True]


def test_end_that_is_refused_keeps_nobody_from_asking(store: Store, proxies: Sequence[ForgingProxy]) -> None:
    """A server without memory, say, refuses it again and again."""
    store.free(taken(store))  # A Redlock's nodes get a script as text when it is first used.
    lease = taken(store)
    for proxy in proxies:
        proxy.forge(KINDS["FREE"], b"-OOM no\r\n")
    with suppress(LockUnavailable):
        store.free(lease)
    assert isinstance(store.acquire(asked(Holder("other"))), Held)


class TestReplaced:
    """The connections to a server are open, but it is no longer the master, or they are out of step; a new connection
    finds the new one. It need not be found at once.
    """

    @pytest.fixture(params=(*REFUSALS, b"+OK\r\n"), ids=repr)
    def store(self, store: Store, proxies: Sequence[ForgingProxy], request: pytest.FixtureRequest) -> Store:
        together = threading.Barrier(3)

        def look() -> None:
            together.wait()
            store.held(KEY)

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.lease = taken(store)
        for proxy in proxies:
            proxy.replace(request.param)
        return store

    def test_renewal(self, store: Store) -> None:
        """A child of a pool may use the store for nothing else."""
        until(lambda: suppressed(lambda: store.renew([self.lease], timeout=1.0)) == [True])

    def test_look(self, store: Store) -> None:
        """A program may do nothing else."""
        until(
            lambda: [held.owner[:24] for held in suppressed(lambda: store.held(KEY)) or []] == [self.lease.owner[:24]]
        )

    def test_question(self, store: Store) -> None:
        other = Holder("other")
        record = Record(other.message, b"refused", 60.0)
        until(lambda: suppressed(lambda: store.refuse(KEY, other, record) is None))

    def test_end(self, store: Store, direct: Store) -> None:
        """It is not left with the old one."""
        with suppress(LockUnavailable):
            store.free(self.lease, record=RECORD)
        until(lambda: direct.held(KEY) == [])
        found = direct.recorded(KEY, RECORD.message)
        assert found is not None
        assert found.content == RECORD.content

    def test_end_comes_before_a_question_about_it(self, store: Store) -> None:
        with suppress(LockUnavailable):
            store.free(self.lease, record=RECORD)
        with suppress(LockUnavailable):
            found = store.recorded(KEY, RECORD.message)
            assert found is not None
            assert found.content == RECORD.content


def suppressed(ask: Callable[[], Answer]) -> Answer | None:
    """What was answered, or None."""
    with suppress(LockUnavailable):
        return ask()
    return None


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_many_connections_that_nobody_has_used_since_they_broke(
    store: Store, proxies: Sequence[ForgingProxy], how: str
) -> None:
    """They are more than a call has tries; a firewall that has forgotten them gives no answer, and no error."""
    for proxy in proxies:
        proxy.delay(0.05)
    threads = [threading.Thread(target=store.held, args=(KEY,)) for _ in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lease = taken(store)
    for proxy in proxies:
        proxy.delay(0.0)
        if how == "closed":
            proxy.cut()
        else:
            proxy.forsake()
    until(lambda: suppressed(lambda: store.renew([lease], timeout=1.0)) == [True])
    assert store.free(lease)


def test_end_reaches_the_last_server_though_its_connection_breaks(
    store: Store, proxies: Sequence[ForgingProxy], redis_server: RedisServer
) -> None:
    """And though nobody uses the store again: the others of a Redlock are a majority."""
    lease, last = taken(store), proxies[-1]
    with redis_server.client(len(proxies) - 1) as client:
        until(lambda: client.exists(inside.lock_key(KEY)))
        last.hold(commands=True)
        with suppress(LockUnavailable):
            store.free(lease)
        last.forsake()
        last.cut()
        last.let_through()
        until(lambda: not client.exists(inside.lock_key(KEY)))
