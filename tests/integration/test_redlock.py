"""Redlock on five real servers that die, hang, are slow, or come back empty."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from redis.connection import Connection as RedisPyConnection

from celery_singleton_lock import LockUnavailable, clock
from tests.contract import inside
from tests.contract.inside import (
    Held,
    Holder,
    Kept,
    Lease,
    LockRequest,
    Record,
    Store,
    new_owner,
    open_url,
)
from tests.patience import LIMIT
from tests.proxy import LossyProxy
from tests.redis_server import RedisServer
from tests.servers import Nodes, until

KEY = "redlock:{job:1}"
RUN = f"{KEY}:run"
TTL = 10.0

#: Seconds of leases of locks that become free because the nodes are told to free them.
LONG = 600.0
ME = Holder("my-task", 0, "worker@host", 42, 1000.0)

#: For nodes that forget nothing in a test, or are to be believed all the same.
BELIEVED = {"restart_delay": False}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    with Nodes(5) as nodes:
        yield nodes


@pytest.fixture
def store(nodes: Nodes) -> Iterator[Store]:
    store = open_url(nodes.url, BELIEVED)
    yield store
    store.close()


def acquire(store: Store, *, ttl: float = TTL, owner: str | None = None, **options: object) -> object:
    return store.acquire(LockRequest(KEY, owner or new_owner(), ttl=ttl, holder=options.pop("holder", ME), **options))


def taken(store: Store, **options: object) -> Lease:
    lease = acquire(store, **options)
    assert isinstance(lease, Lease)
    return lease


def hang(server: RedisServer) -> None:
    server.pause()


def die(server: RedisServer) -> None:
    server.kill()


@pytest.fixture(params=[False, True], ids=["new connections", "old connections"])
def connected(request: pytest.FixtureRequest, store: Store) -> None:
    """Some failures look different on existing connections."""
    if request.param:
        store.free(taken(store))


def taken_on_all(nodes: Nodes, store: Store) -> Lease:
    lease = taken(store)
    until(lambda: len(nodes.holding(RUN)) == len(nodes.servers), "all nodes have it")
    return lease


def renewed(store: Store, lease: Lease) -> bool:
    try:
        return store.renew([lease], timeout=0.5) == [True]
    except LockUnavailable:
        return False


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize("fail", [die, hang])
class TestFailedNodes:
    @pytest.mark.parametrize("failed", [0, 1, 2])
    def test_minority_does_not_matter(self, nodes: Nodes, store: Store, fail: Callable, failed: int) -> None:
        for server in nodes.servers[:failed]:
            fail(server)
        for _ in range(20):
            lease = taken(store)
            assert isinstance(acquire(store), Held)
            assert store.renew([lease], timeout=LIMIT) == [True]
            assert store.free(lease)
        resume(nodes)
        began = clock.now()
        until(lambda: nodes.holding(RUN) == [], "the nodes that came back have carried out the releases as well")
        assert clock.now() - began < TTL / 2, "by the releases, not by the ttl"

    def test_majority_matters(self, nodes: Nodes, store: Store, fail: Callable) -> None:
        for server in nodes.servers[:3]:
            fail(server)
        began = clock.now()
        with pytest.raises(LockUnavailable, match="3 of 5 nodes are needed"):
            acquire(store)
        assert clock.now() - began < TTL / 2
        resume(nodes)
        until(lambda: nodes.holding(RUN) == [], "nothing is left of the attempts")
        until(lambda: isinstance(acquire_or_none(store), Lease), "it is available again")

    def test_holder_learns_that_it_has_lost_the_majority(self, nodes: Nodes, store: Store, fail: Callable) -> None:
        kept = Kept(store, taken(store, ttl=6.0))
        for server in nodes.servers[:3]:
            fail(server)
        assert kept.told.wait(LIMIT)
        assert kept.left > 0, "before anybody else could have it"
        resume(nodes)


def resume(nodes: Nodes) -> None:
    for server in nodes.servers:
        if server.pid is None:
            server.start()
        server.resume()


def acquire_or_none(store: Store) -> object:
    try:
        return acquire(store)
    except LockUnavailable:
        return None


class TestReach:
    def test_lease_excludes_the_time_of_the_acquire_and_clock_drift(self, store: Store) -> None:
        before = clock.now()
        lease = taken(store)
        assert lease.trusted_until <= before + (clock.now() - before) + TTL - TTL * 0.01 - 0.002

    def test_slow_node_is_not_waited_for(self, nodes: Nodes) -> None:
        with ExitStack() as exits:
            slow = exits.enter_context(LossyProxy(nodes.servers[0].port))
            store = open_url(";".join([f"redis://127.0.0.1:{slow.port}", *nodes.url.split(";")[1:]]), BELIEVED)
            store.free(taken(store))
            slow.delay(1.0)
            began = clock.now()
            for _ in range(20):
                store.free(taken(store))
            assert clock.now() - began < 10.0, "no round has waited for it"
            store.close()

    def test_caller_never_connects_to_a_node_that_hangs(
        self, nodes: Nodes, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        dialed: list[threading.Thread] = []
        dial: Callable[[Any], Any] = RedisPyConnection._connect

        def noted(connection: Any) -> Any:
            if connection.port == nodes.servers[0].port:
                dialed.append(threading.current_thread())
            return dial(connection)

        lease = taken_on_all(nodes, store)
        hang(nodes.servers[0])
        monkeypatch.setattr(RedisPyConnection, "_connect", noted)
        until(lambda: renewed(store, lease) and len(dialed) > 1, "it is tried again")
        assert threading.current_thread() not in dialed, "the caller would wait for it"
        count = len(dialed)
        until(lambda: len(dialed) > count, "without a further call, too")
        resume(nodes)

    def test_connections_that_a_firewall_has_forgotten_are_replaced(self, nodes: Nodes) -> None:
        with ExitStack() as exits:
            ways = [exits.enter_context(LossyProxy(server.port)) for server in nodes.servers]
            store = open_url(";".join(f"redis://127.0.0.1:{way.port}" for way in ways), BELIEVED)
            exits.callback(store.close)
            assert store.free(taken(store))
            for way in ways:
                way.forsake()
            began = clock.now()
            with suppress(LockUnavailable):
                store.acquire(LockRequest(KEY, new_owner(), ttl=TTL, holder=Holder("first")))
            clock.sleep(max(began + inside.seconds("for which a node may be mute") - clock.now(), 0.0))
            assert isinstance(
                store.acquire(LockRequest(f"{KEY}:2", new_owner(), ttl=TTL, holder=Holder("second"))), Lease
            )

    def test_no_threads_and_few_connections(self, nodes: Nodes, store: Store, started: list[threading.Thread]) -> None:
        nodes.servers[0].pause()
        for _ in range(50):
            store.free(taken(store))
        assert len(started) <= 2, "one that reads late answers and one that repeats, not one per call"
        nodes.servers[0].resume()
        assert all(server.client().info("clients")["connected_clients"] <= 3 for server in nodes.servers)

    def test_minimal_acl_is_enough(self, nodes: Nodes) -> None:
        rights = ("~singleton_lock:*", "~redlock:*", "+@read", "+@write", "+@scripting", "+time")
        for server in nodes.servers:
            server.client().execute_command("ACL", "SETUSER", "locks", "on", ">secret", *rights)
            server.client().set("singleton_lock:memory", 1, px=100_000_000_000)
        store = open_url(";".join(f"redis://locks:secret@127.0.0.1:{server.port}/0" for server in nodes.servers))
        lease = taken(store, waiting=True, check_finished=True)
        assert isinstance(acquire(store, waiting=True), Held)
        with store.waiter(LockRequest(KEY, new_owner(), ttl=TTL, holder=ME)) as waiter:
            assert isinstance(waiter.wait(0.1), Held)
        assert store.renew([lease], timeout=LIMIT) == [True]
        assert [held.holder for held in store.held(KEY)] == [ME]
        assert store.free(lease, record=Record(ME.message, b"record", 60))
        store.close()


class TestGivenUp:
    """An acquire that was given up is not a hold, whatever the nodes carry out later."""

    def stop_majority(self, nodes: Nodes) -> None:
        for server in nodes.servers[:3]:
            server.pause()

    def wait_until_free(self, nodes: Nodes) -> None:
        """Meanwhile, nobody asks the nodes for anything."""
        began = clock.now()
        resume(nodes)
        until(lambda: nodes.holding(RUN) == [], "the nodes were told to free it")
        assert clock.now() - began < LONG / 2, "by the commands, not by the ttl"

    @pytest.mark.parametrize("connected", [False, True], ids=["new connections", "old connections"])
    def test_acquire_without_an_answer_leaves_nothing(self, nodes: Nodes, store: Store, connected: bool) -> None:
        if connected:
            store.free(taken(store))
        self.stop_majority(nodes)
        with pytest.raises(LockUnavailable):
            acquire(store, ttl=LONG)
        self.wait_until_free(nodes)


class TestManyLeases:
    def many(self, store: Store, count: int, ttl: float) -> list[Lease]:
        """Leases as if they had been acquired: renewals of others put them on the nodes."""
        return [Lease(f"many:{{{n}}}", new_owner(), ttl=ttl, fence=1, sent_at=clock.now()) for n in range(count)]

    def test_thousands_are_renewed_at_once(self, nodes: Nodes, store: Store) -> None:
        leases = self.many(store, 2000, 30.0)
        for server in nodes.servers:
            with server.client().pipeline(transaction=False) as pipe:
                for lease in leases:
                    pipe.set(f"{lease.key}:run", lease.owner, px=30_000)
                pipe.execute()
        before = min(lease.trusted_until for lease in leases)
        assert store.renew(leases, timeout=5.0) == [True] * 2000
        assert all(lease.trusted_until > before for lease in leases)
        assert store.renew(self.many(store, 2000, 30.0), timeout=5.0) == [False] * 2000


class TestForgetfulNodes:
    def hold_on_first_three(self, nodes: Nodes, options: dict[str, object]) -> tuple[Store, Lease]:
        store = open_url(nodes.url, options)
        for server in nodes.servers[3:]:
            server.kill()
        lease = taken(store)
        assert nodes.holding(RUN) == [0, 1, 2]
        for server in nodes.servers[3:]:
            server.start()
        return store, lease

    def remember(self, nodes: Nodes) -> None:
        """Let the nodes know that they have been up for long."""
        for server in nodes.servers:
            server.client().set("singleton_lock:memory", 1, px=100_000_000_000)

    def test_node_that_came_back_empty_has_no_vote_for_one_ttl(self, nodes: Nodes) -> None:
        self.remember(nodes)
        _, lease = self.hold_on_first_three(nodes, {})
        nodes.servers[0].restart()
        other = open_url(nodes.url)
        assert not isinstance(acquire_for(other, 2.0), Lease)
        assert lease.held
        until(lambda: isinstance(acquire_for(other, 2.0), (Lease, Held)), "they vote again after one ttl")

    def test_log_says_once_when_new_nodes_vote(self, nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
        for _ in range(3):
            with pytest.raises(LockUnavailable, match="has no vote"):
                acquire(open_url(nodes.url))
        said = re.compile(rf"(\d) of 5 nodes are new, or came back without their data; they vote in {TTL:g} s")
        found = [said.search(record.getMessage()) for record in caplog.records]
        # Several lines if a node was late.
        assert 3 <= sum(int(each[1]) for each in found if each is not None) <= 5, caplog.text


def acquire_for(store: Store, ttl: float) -> object:
    try:
        return acquire(store, ttl=ttl)
    except LockUnavailable:
        return None


class TestWaiting:
    def wait_for(self, store: Store, holder: Holder = ME) -> tuple[threading.Thread, list[object]]:
        got: list[object] = []

        def wait() -> None:
            request = LockRequest(KEY, new_owner(), ttl=TTL, holder=holder)
            with store.waiter(request) as waiter:
                found = store.acquire(request)
                while isinstance(found, Held):
                    found = waiter.wait(found.remaining + 0.002)
            got.append(found)
            store.free(found)

        thread = threading.Thread(target=wait)
        thread.start()
        return thread, got

    @pytest.mark.parametrize("dead", range(-1, 5))
    def test_release_wakes_a_waiter(
        self, nodes: Nodes, store: Store, dead: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also if the node that would wake it is dead."""
        inside.set_seconds(monkeypatch, "of one wait of a waiter", 600.0)
        if dead >= 0:
            nodes.servers[dead].kill()
        lease = taken(store, ttl=60)
        thread, got = self.wait_for(open_url(nodes.url, BELIEVED))
        until(lambda: blocked(nodes) == 1, "it waits")
        store.free(lease)
        thread.join(LIMIT)
        assert got, "it does not wait until it looks by itself"


def pttl(server: RedisServer, key: str) -> int:
    return int(server.client().pttl(key))


def blocked(nodes: Nodes) -> int:
    return sum(server.client().info("clients")["blocked_clients"] for server in nodes.servers if server.pid)
