"""Redlock on five real servers that die, hang, are slow, or come back empty."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from celery_singleton_lock import LockUnavailable, clock
from tests.bench import Bench
from tests.contract import inside
from tests.contract.inside import (
    Freeing,
    Held,
    Holder,
    Kept,
    Lease,
    LockRequest,
    Record,
    Reservation,
    Store,
    new_owner,
    node_command,
    node_told,
    open_url,
)
from tests.integration.conftest import Shop
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


def taken_on_all(nodes: Nodes, store: Store) -> Lease:
    lease = taken(store)
    until(lambda: len(nodes.holding(RUN)) == len(nodes.servers), "all nodes have it")
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

    def test_first_renewal_does_not_wait_for_a_minority(self, nodes: Nodes, store: Store, fail: Callable) -> None:
        """However long its caller would wait for an answer: meanwhile, the lease ends."""
        lease = taken_on_all(nodes, store)
        for server in nodes.servers[:2]:
            fail(server)
        with closing(open_url(nodes.url, BELIEVED)) as another:
            assert another.renew([lease], timeout=LIMIT) == [True]

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


def acquire_once(store: Store) -> object:
    """As a message that does not run if it has a record."""
    try:
        return acquire(store, check_finished=True)
    except LockUnavailable:
        return None


class TestReach:
    @pytest.mark.parametrize("fail", [hang, die])
    def test_what_is_left_on_a_minority_holds_nothing(self, nodes: Nodes, store: Store, fail: Callable) -> None:
        """As what a process left that was killed before it had said everywhere that the lock is free."""
        lease = taken_on_all(nodes, store)
        for server in nodes.servers[:3]:
            assert server.client().delete(RUN) == 1
        fail(nodes.servers[0])
        with pytest.raises(LockUnavailable, match="3 of 5 nodes are needed"):
            acquire(store)
        resume(nodes)
        found: list[object] = []
        until(lambda: found.append(acquire_or_none(store)) or isinstance(found[-1], Lease), "it is free")
        assert isinstance(other := found[-1], Lease)
        assert other.owner != lease.owner

    def test_holder_on_the_majority_is_named(self, nodes: Nodes, store: Store) -> None:
        taken(store)
        found = acquire(open_url(nodes.url, BELIEVED))
        assert isinstance(found, Held)
        assert found.holder == ME
        assert 0 < found.remaining <= TTL

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

    def test_refusal_waits_for_the_majority_that_agrees(self, nodes: Nodes) -> None:
        urls = nodes.url.split(";")
        with LossyProxy(nodes.servers[4].port) as slow:
            store = open_url(";".join([*urls[:4], f"redis://127.0.0.1:{slow.port}"]), BELIEVED)
            for url in urls[:2]:
                one = open_url(url)
                assert isinstance(
                    one.acquire(LockRequest(KEY, new_owner(), ttl=TTL, holder=replace(ME, pid=43))), Lease
                )
                one.close()
            slow.delay(0.05)
            assert store.refuse(KEY, ME, Record(ME.message, b"refused", 60.0)) is None
            store.close()

    def test_silence_does_not_take_back_a_refusal(
        self, nodes: Nodes, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The refusal may belong to another copy, which looks like this one."""
        inside.set_seconds(monkeypatch, "for which a node may be mute", LONG)  # The nodes are to get all that is sent.
        record, key = Record(ME.message, b"refused", 60.0), inside.record_key(KEY, ME.message)
        clients = [server.client() for server in nodes.servers]
        assert store.refuse(KEY, ME, record) is None
        until(lambda: all(client.get(key) == "refused" for client in clients), "all nodes have it")
        for server in nodes.servers[:3]:
            hang(server)
        with pytest.raises(LockUnavailable):
            store.refuse(KEY, ME, record)
        assert [client.get(key) for client in clients[3:]] == ["refused"] * 2
        resume(nodes)
        another = Holder("another")
        assert store.refuse(KEY, another, record._replace(message=another.message)) is None
        other_key = inside.record_key(KEY, another.message)
        until(lambda: all(client.get(other_key) for client in clients), "they have read the earlier commands")
        assert [client.get(key) for client in clients] == ["refused"] * 5

    def test_nobody_waits_for_a_promise_that_was_not_answered(self, nodes: Nodes, store: Store) -> None:
        """The message comes again, and would find its own promise for half a minute."""
        assert store.free(taken(store))
        for server in nodes.servers[:3]:
            hang(server)
        with pytest.raises(LockUnavailable):
            store.refuse(KEY, ME, Record(ME.message, b"refused", 60.0))
        resume(nodes)
        began = clock.now()
        until(lambda: isinstance(acquire_once(store), Lease), "the message runs")
        assert clock.now() - began < inside.seconds("that a promise lasts") / 2

    def test_nobody_waits_for_a_promise_that_was_interrupted(
        self, nodes: Nodes, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ask = inside.step("ask")

        def interrupted(*args: Any, **options: Any) -> None:
            ask(*args, **options)
            raise SoftTimeLimitExceeded

        inside.set_step(monkeypatch, "ask", interrupted)
        with pytest.raises(SoftTimeLimitExceeded):
            store.refuse(KEY, ME, Record(ME.message, b"refused", 60.0))
        monkeypatch.undo()
        began = clock.now()
        until(lambda: isinstance(acquire_once(store), Lease), "the message runs")
        assert clock.now() - began < inside.seconds("that a promise lasts") / 2

    @pytest.mark.parametrize("node", [0, 1])
    def test_record_that_is_interrupted_is_written_to_a_majority(
        self, nodes: Nodes, store: Store, monkeypatch: pytest.MonkeyPatch, node: int
    ) -> None:
        """One that only some nodes have would be the end of the message for those copies that ask these first."""
        send, clients = inside.step("send to one"), [server.client() for server in nodes.servers]

        def interrupted(it: Any, to: Any, request: Any, *args: Any) -> None:
            if to.index == node and b"refused" in request.call.args:
                raise SoftTimeLimitExceeded
            send(it, to, request, *args)

        inside.set_step(monkeypatch, "send to one", interrupted)
        with pytest.raises(SoftTimeLimitExceeded):
            store.refuse(KEY, ME, Record(ME.message, b"refused", 60.0))
        monkeypatch.undo()
        key = inside.record_key(KEY, ME.message)
        until(
            lambda: [client.get(key) for client in clients].count("refused") >= 3,
            seconds=inside.seconds("that a promise lasts") / 2,
        )

    def test_promise_of_one_node_is_outvoted(self) -> None:
        """However soon that node answers."""
        with Nodes(3, proxied=True) as nodes:
            store = open_url(nodes.url, BELIEVED)
            record = Record(ME.message, b"refused", 60.0)
            node_told(store, 0, node_command("refuse", KEY, ME, node_command("promise_of", record, 30.0)))
            nodes.slow(1, 0.05)
            nodes.slow(2, 0.05)
            assert isinstance(acquire_once(store), Lease)
            store.close()

    def test_promise_that_is_taken_back_late(self, nodes: Nodes, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """The next promise is another one: what takes the first one back comes on a connection of its own."""
        key, clients = inside.record_key(KEY, ME.message), [server.client() for server in nodes.servers]
        ask, late, promised = inside.step("ask"), list[Any](), list[object]()

        def ask_then(it: Any, call: Any, *args: Any, **options: Any) -> dict[int, Any]:
            if call.args[0] == b"refused":
                for number in range(5):
                    for taken_back in late:
                        node_told(store, number, taken_back)
                promised.extend(client.get(key) for client in clients)
            return ask(it, call, *args, **options)

        def send_later(it: Any, call: Any, *args: Any, **options: Any) -> None:
            late.append(call)
            for client in clients[:3]:
                client.delete(key)  # Gone by the next try.

        for client in clients[:3]:
            client.set(key, "?anothersrefused")
        inside.set_step(monkeypatch, "send", send_later)
        inside.set_step(monkeypatch, "ask", ask_then)
        inside.set_seconds(monkeypatch, "that the nodes have to answer", LIMIT)
        assert store.refuse(KEY, ME, Record(ME.message, b"refused", 60.0)) is None
        assert late, "a promise was taken back"
        assert sum(text is not None for text in promised) >= 3

    def test_record_of_another_copy_is_not_taken_back(
        self, nodes: Nodes, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """This process slept for so long that its promise has expired, and a copy has promised the same meanwhile."""
        key, clients = inside.record_key(KEY, ME.message), [server.client() for server in nodes.servers]
        ask, send, record = inside.step("ask"), inside.step("send"), Record(ME.message, b"refused", 60.0)
        promise = node_command("promise_of", record, 30.0)
        taking_its_place = node_command("refuse", KEY, ME, record, promise=promise)

        def ask_late(it: Any, call: Any, *args: Any, **options: Any) -> dict[int, Any]:
            if call.args[0] == record.content:
                for client in clients:
                    client.set(key, promise.content, px=30_000)
            return ask(it, call, *args, **options)

        def send_late(it: Any, *args: Any, **options: Any) -> None:
            for number in range(5):
                assert node_told(store, number, taking_its_place) == [inside.answer("GRANTED")]
            send(it, *args, **options)

        inside.set_step(monkeypatch, "ask", ask_late)
        inside.set_step(monkeypatch, "send", send_late)
        with pytest.raises(LockUnavailable):
            store.refuse(KEY, ME, record)
        monkeypatch.undo()
        other = Holder("another")
        assert store.refuse(KEY, other, record._replace(message=other.message)) is None
        until(lambda: all(each.exists(inside.record_key(KEY, other.message)) for each in clients), "all is carried out")
        assert [client.get(key) for client in clients].count("refused") >= 3

    def test_record_takes_the_place_of_its_promise_only(self, nodes: Nodes, store: Store) -> None:
        record = Record(ME.message, b"refused", 60.0)
        promise, another = (node_command("promise_of", record, 5.0) for _ in range(2))
        refusal = node_command("refuse", KEY, ME, record, promise=promise)
        assert node_told(store, 0, refusal) == [inside.answer("GIVEN_UP")]
        assert node_told(store, 0, node_command("refuse", KEY, ME, another)) == [inside.answer("GRANTED")]
        assert node_told(store, 0, refusal) == [inside.answer("GIVEN_UP")]
        assert node_told(store, 0, node_command("take_back", KEY, another)) == 1
        assert node_told(store, 0, node_command("refuse", KEY, ME, promise)) == [inside.answer("GRANTED")]
        assert node_told(store, 0, refusal) == [inside.answer("GRANTED")]
        assert nodes.servers[0].client().get(inside.record_key(KEY, ME.message)) == "refused"

    def test_lost_replies_of_a_minority_do_not_matter(self, nodes: Nodes) -> None:
        with ExitStack() as exits:
            proxies = [exits.enter_context(LossyProxy(server.port)) for server in nodes.servers]
            store = open_url(";".join(f"redis://127.0.0.1:{proxy.port}" for proxy in proxies), BELIEVED)
            store.free(taken(store))
            for proxy in proxies[:2]:
                proxy.lose(1)
            lease = taken(store)
            assert store.free(lease)
            until(lambda: nodes.holding(RUN) == [], "the other nodes get the release on a new connection")
            store.close()

    def test_error_of_one_node_is_not_an_error(self, nodes: Nodes, store: Store) -> None:
        nodes.servers[0].client().execute_command("ACL", "SETUSER", "default", "-@scripting")
        lease = taken(store)
        assert store.free(lease)

    def test_reasons_of_all_nodes_are_reported(self, nodes: Nodes, store: Store) -> None:
        for server in nodes.servers[:3]:
            server.client().execute_command("ACL", "SETUSER", "default", "-@scripting")
        with pytest.raises(LockUnavailable, match=r"(?s)(NoPermission.*){3}"):
            acquire(store)

    def test_release_that_reaches_no_majority_says_so(self, nodes: Nodes, store: Store) -> None:
        lease = taken(store)
        for server in nodes.servers[:4]:
            server.kill()
        with pytest.raises(LockUnavailable):
            store.free(lease)

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

    def test_seeded_random_numbers_make_no_equal_owners(self, store: Store) -> None:
        owners = []
        for _ in range(2):
            random.seed(0)
            lease = taken(store)
            owners.append(lease.owner)
            assert store.free(lease)
        assert owners[0] != owners[1]


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

    def test_acquire_whose_connections_are_cut_leaves_nothing(self, nodes: Nodes) -> None:
        with ExitStack() as exits:
            proxies = [exits.enter_context(LossyProxy(server.port)) for server in nodes.servers]
            store = open_url(";".join(f"redis://127.0.0.1:{proxy.port}" for proxy in proxies), BELIEVED)
            store.free(taken(store))
            self.stop_majority(nodes)
            with pytest.raises(LockUnavailable):
                acquire(store, ttl=LONG)
            for proxy in proxies:
                proxy.cut()
            self.wait_until_free(nodes)
            store.close()

    def test_interrupted_acquire_leaves_nothing(self, nodes: Nodes, store: Store) -> None:
        store.free(taken(store))
        self.stop_majority(nodes)

        def interrupted(hear: inside.Call) -> inside.Call:
            def interrupt(seconds: float) -> bool:
                if seconds:
                    raise KeyboardInterrupt
                return hear(seconds)

            return interrupt

        inside.listened(store, interrupted)
        with pytest.raises(KeyboardInterrupt):
            acquire(store, ttl=LONG)
        self.wait_until_free(nodes)

    @pytest.mark.parametrize(
        "ending",
        [
            lambda store, lease: store.free(lease, record=Record(ME.message, b"record", 60.0)),
            lambda store, lease: store.abandon(lease),
        ],
        ids=["free", "abandon"],
    )
    def test_interrupted_end_is_sent_anyway(
        self,
        nodes: Nodes,
        store: Store,
        ending: Callable[[Store, Lease], object],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A time limit strikes during the connection to a node, before any node was told."""
        lease = taken(store, ttl=LONG)
        until(lambda: len(nodes.holding(RUN)) == 5, "all nodes have it")

        def interrupted(*_: object, **__: object) -> None:
            monkeypatch.undo()
            raise SoftTimeLimitExceeded

        inside.set_step(monkeypatch, "connect", interrupted)
        with pytest.raises(SoftTimeLimitExceeded):
            ending(store, lease)
        until(lambda: not nodes.holding(RUN), "all nodes have freed it")

    def test_release_without_an_answer_is_repeated_and_counts(self, nodes: Nodes, store: Store) -> None:
        lease = taken(store, ttl=LONG)
        self.stop_majority(nodes)
        with pytest.raises(LockUnavailable):
            store.free(lease)
        self.wait_until_free(nodes)
        assert store.free(lease) == Freeing.UNCLEAR

    def test_release_is_repeated_to_nodes_that_come_back_with_their_data(self, nodes: Nodes, store: Store) -> None:
        lease = taken(store, ttl=LONG)
        for server in nodes.servers[:3]:
            server.client().save()
            server.kill()
        with pytest.raises(LockUnavailable):
            store.free(lease)
        self.wait_until_free(nodes)

    def test_attempts_that_a_node_never_answers_do_not_add_up(self) -> None:
        """A waiter may ask for days, while the connections of one node are cut each time."""
        with Nodes(3, proxied=True) as nodes:
            store = open_url(nodes.url, BELIEVED)
            lease, most = taken(store, ttl=LONG), inside.number("owners that a request gives up")
            request = LockRequest(KEY, new_owner(), ttl=TTL, holder=Holder("another"))
            for _ in range(most + 4):
                assert store.renew([lease], timeout=1.0) == [True]  # This opens a new connection to the node.
                nodes.proxies[0].hold(replies=True)
                assert isinstance(store.acquire(request), Held)
                nodes.proxies[0].cut()
                nodes.proxies[0].let_through()
            assert len(request.given_up) == most
            store.close()

    def test_abandoned_owner_no_longer_takes_anything(self, nodes: Nodes, store: Store) -> None:
        owner = new_owner()
        lease = taken(store, owner=owner)
        store.abandon(lease)
        until(lambda: nodes.holding(RUN) == [], "it is free")
        assert not isinstance(acquire_by(store, owner), Lease)
        assert isinstance(acquire(store), Lease)

    @pytest.mark.parametrize("leaves", [{}, {"record": Record(ME.message, b"record", 60.0)}, {"reservation": True}])
    def test_late_release_frees_nothing_of_the_next_holder(
        self, nodes: Nodes, store: Store, leaves: dict[str, Any]
    ) -> None:
        """Even if both have the same message: another thread has sent the release, on its own connection."""
        if leaves.get("reservation"):
            leaves = {"reservation": Reservation(replace(ME, retries=1), TTL)}
        first = taken_on_all(nodes, store)
        late = node_command("free_for_good", first, **leaves)
        assert store.free(first)
        lease = taken_on_all(nodes, store)
        for number in range(5):
            assert node_told(store, number, late) == inside.answer_to_free("NOT_OURS")
        assert len(nodes.holding(RUN)) == 5
        assert store.renew([lease], timeout=1.0) == [True]

    def test_freed_owner_no_longer_takes_anything(self, nodes: Nodes, store: Store) -> None:
        """So a late command for it cannot meet its newer hold; each hold has its own owner."""
        lease = taken_on_all(nodes, store)
        assert store.free(lease)
        until(lambda: nodes.holding(RUN) == [], "it is free")
        assert not isinstance(acquire_by(store, lease.owner), Lease)
        assert isinstance(acquire(store), Lease)

    @pytest.mark.parametrize("how", ["acquire", "waiter", "acquire, then waiter"])
    def test_late_attempt_takes_nothing_from_the_next_one(
        self, nodes: Nodes, store: Store, monkeypatch: pytest.MonkeyPatch, how: str
    ) -> None:
        """Nor does the undoing, which may come even later: another thread has sent it, on its own connection."""
        ask, send, late = inside.step("ask"), inside.step("send"), []

        def ask_late(it: Any, call: Any, *args: Any, **options: Any) -> dict[int, Any]:
            if late:
                return ask(it, call, *args, **options)
            late.append(call)
            return inside.no_answers()

        def send_late(it: Any, call: Any, *args: Any, **options: Any) -> None:
            if len(late) > 1:
                send(it, call, *args, **options)
            else:
                late.append(call)

        inside.set_step(monkeypatch, "ask", ask_late)
        inside.set_step(monkeypatch, "send", send_late)
        if how == "acquire":
            lease = taken(store)
        else:
            inside.set_number(monkeypatch, "tries to ask the nodes", 1)
            request = LockRequest(KEY, new_owner(), ttl=TTL, holder=ME)
            with store.waiter(request) as waiter:
                with pytest.raises(LockUnavailable):
                    waiter.ask() if how == "waiter" else store.acquire(request)
                lease = waiter.ask()
        assert isinstance(lease, Lease)
        for number in range(5):
            for call in late:
                node_told(store, number, call)
        assert store.renew([lease], timeout=1.0) == [True]

    def test_next_attempt_has_another_owner(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        """The caller is told before it is asked, and the request names the owner that was given up."""
        ask, owners = inside.step("ask"), [new_owner()]

        def ask_in_vain(it: Any, call: Any, *args: Any, **options: Any) -> dict[int, Any]:
            return inside.no_answers() if len(owners) == 1 else ask(it, call, *args, **options)

        def another() -> str:
            owners.append(new_owner())
            return owners[-1]

        inside.set_step(monkeypatch, "ask", ask_in_vain)
        request = LockRequest(KEY, owners[0], ttl=TTL, holder=ME, another=another)
        lease = store.acquire(request)
        assert isinstance(lease, Lease)
        assert owners == [*request.given_up, lease.owner]
        assert request.owner == lease.owner

    def test_owner_that_others_know_asks_once(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[object] = []

        def ask_in_vain(_: Any, call: Any, *args: object, **options: object) -> dict[int, Any]:
            asked.append(call)
            return inside.no_answers()

        with monkeypatch.context() as patch:
            inside.set_step(patch, "ask", ask_in_vain)
            request = LockRequest(KEY, owner := new_owner(), ttl=TTL, holder=ME, another=None)
            with pytest.raises(LockUnavailable):
                store.acquire(request)
        assert len(asked) == 1
        assert isinstance(acquire_by(store, owner), Lease), "it was not given up: it may have had the lock before"

    def test_refused_request_keeps_its_owner(self, nodes: Nodes, store: Store) -> None:
        """Nothing is left of it: whoever waits and asks again and again leaves nothing either."""
        taken_on_all(nodes, store)
        request = LockRequest(KEY, owner := new_owner(), ttl=TTL, holder=Holder("another"))
        assert [isinstance(store.acquire(request), Held) for _ in range(3)] == [True] * 3
        assert (request.owner, request.given_up) == (owner, ())

    def test_late_attempt_does_not_shorten_a_hold(self, nodes: Nodes, store: Store) -> None:
        """The lock of a message lasts for a day once it is confirmed, and nobody renews it."""
        lease = taken_on_all(nodes, store)
        assert store.renew([lease.with_ttl(LONG)], timeout=1.0) == [True]
        until(lambda: all(pttl(server, RUN) > 1000 * TTL for server in nodes.servers), "all nodes have renewed it")
        request = LockRequest(KEY, lease.owner, ttl=TTL, holder=ME)
        assert node_told(store, 0, node_command("vote", request, memory=None))[0] == inside.answer("GRANTED")
        assert pttl(nodes.servers[0], RUN) > 1000 * TTL

    def test_abandoning_never_raises(self, nodes: Nodes, store: Store) -> None:
        lease = taken(store, ttl=LONG)
        self.stop_majority(nodes)
        store.abandon(lease)
        self.wait_until_free(nodes)

    def test_thread_ends_when_nothing_is_pending(self, nodes: Nodes, store: Store) -> None:
        self.stop_majority(nodes)
        with pytest.raises(LockUnavailable):
            acquire(store, ttl=LONG)
        self.wait_until_free(nodes)
        until(lambda: not inside.repeating_threads(store), "nothing is pending any more")

    def test_connection_is_kept_after_a_hold_was_put_back(self, nodes: Nodes, store: Store) -> None:
        lease = taken_on_all(nodes, store)
        with nodes.servers[0].client() as client:
            client.delete(RUN)
        until(lambda: renewed(store, lease) and len(nodes.holding(RUN)) == 5, "all nodes have it again")
        until(lambda: inside.has_heard_all(store), "all nodes have answered")
        assert all(inside.connected(store))

    def test_connection_to_a_node_that_stays_silent_is_given_up(
        self, nodes: Nodes, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert store.free(taken_on_all(nodes, store))
        until(lambda: inside.has_heard_all(store), "all nodes have answered")
        inside.set_seconds(monkeypatch, "for which a node may be mute", 0.1)
        hang(nodes.servers[0])

        def reached() -> list[bool]:
            assert store.free(taken(store))
            return inside.connected(store)

        until(lambda: reached() == [False, True, True, True, True], "the line to the node is given up")
        assert inside.nodes_of(store)[0].has_failed

    def test_node_that_cannot_be_connected_to_is_left_alone(self, nodes: Nodes, store: Store) -> None:
        node = inside.nodes_of(store)[0]
        hang(nodes.servers[0])
        assert node.open(0.05) is None
        assert node.is_avoided


class TestManyLeases:
    def many(self, store: Store, count: int, ttl: float) -> list[Lease]:
        """Leases as if they had been acquired: renewals of others put them on the nodes."""
        return [Lease(f"many:{{{n}}}", new_owner(), ttl=ttl, fence=1, sent_at=clock.now()) for n in range(count)]

    def test_round_has_one_timeout_for_all_leases_when_a_majority_is_silent(self, nodes: Nodes, store: Store) -> None:
        store.free(taken(store))
        for server in nodes.servers[:3]:
            server.pause()
        waits: list[float] = []
        inside.listened(store, lambda hear: lambda seconds: waits.append(seconds) or hear(seconds))
        with pytest.raises(LockUnavailable):
            store.renew(self.many(store, 5000, 30.0), timeout=0.5)
        assert waits, "it has waited"
        assert sorted(filter(None, waits), reverse=True) == [*filter(None, waits)], "the waits share one timeout"
        assert max(waits) <= 0.5
        resume(nodes)

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

    @pytest.mark.slow
    def test_holders_are_notified_before_their_leases_end(self, nodes: Nodes, store: Store) -> None:
        def acquired() -> Iterator[Lease]:
            """Each is renewed while others are acquired, which takes long on a loaded machine."""
            for number in range(300):
                holder = Holder(f"task {number}")
                lease = store.acquire(LockRequest(f"many:{{{number}}}", new_owner(), ttl=6.0, holder=holder))
                assert isinstance(lease, Lease)
                yield lease

        kept = Kept.together(store, acquired())
        for server in nodes.servers[:3]:
            server.pause()
        until(lambda: all(each.told.is_set() for each in kept), "all were notified")
        assert min(each.left for each in kept) > 0, "before anybody else could have it"
        resume(nodes)


def acquire_by(store: Store, owner: str) -> object:
    try:
        return acquire(store, owner=owner)
    except LockUnavailable:
        return None


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

    def test_two_clients_get_the_lock_where_the_nodes_are_believed(self, nodes: Nodes) -> None:
        """The problem that the rest of this class is about."""
        _, lease = self.hold_on_first_three(nodes, BELIEVED)
        nodes.servers[0].restart()
        assert isinstance(acquire(open_url(nodes.url, BELIEVED)), Lease)
        assert lease.held

    def test_lock_of_a_message_is_on_all_nodes_again_when_it_is_confirmed(self, nodes: Nodes) -> None:
        """Its sender confirms it, or each worker that gets it: the lock is not renewed while the message waits."""
        key, owner = f"{KEY}:queue", new_owner()
        lock = inside.queue_lock(key, owner, LONG)
        store = open_url(nodes.url, BELIEVED)
        assert isinstance(store.acquire(lock.request(ME)), Lease)
        run = inside.lock_key(key)
        until(lambda: len(nodes.holding(run)) == 5)
        nodes.servers[0].restart()
        until(lambda: nodes.holding(run) == [1, 2, 3, 4])

        def is_everywhere() -> bool:
            """A node whose connection broke at its restart gets it the next time."""
            confirmations.add(lock.confirmed())
            confirmations.send_all()
            return len(nodes.holding(run)) == 5

        confirmations = inside.confirmations(store)
        until(is_everywhere)
        store.free(lock.hold())
        until(lambda: nodes.holding(run) == [])

    def test_lock_of_a_message_is_on_all_nodes_again_while_its_body_runs(
        self, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        app = Celery("restarts", set_as_current=False, broker="memory://", backend="cache+memory://")
        app.conf.update(singleton_lock_backend=nodes.url, singleton_lock_transport_options=BELIEVED)
        bench = Bench(app, monkeypatch)

        def body() -> str:
            locks = [inside.lock_key(key) for key in (of_message, task.lock_key_of())]
            for server in nodes.servers:
                server.restart()
                until(lambda: all(len(nodes.holding(each)) == 5 for each in locks), "all nodes have both")
            return "held"

        task = bench.task(body, lock_scope="until_executed", lock_ttl=6.0)
        message = bench.send(task)
        of_message = task.delay().lock_key
        assert bench.deliver(message) == "held"

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

    def test_flushed_node_has_no_vote_either(self, nodes: Nodes) -> None:
        self.remember(nodes)
        lease = taken_on_all(nodes, open_url(nodes.url))
        for server in nodes.servers[:3]:
            server.flush()
        assert not isinstance(acquire_or_none(open_url(nodes.url)), Lease)
        for server in nodes.servers[3:]:
            server.flush()
        with pytest.raises(LockUnavailable, match="it came back without its data, and has no vote for"):
            acquire(open_url(nodes.url))
        assert lease.held

    def test_minority_does_not_matter(self, nodes: Nodes) -> None:
        self.remember(nodes)
        store = open_url(nodes.url)
        store.free(taken(store))
        for server in nodes.servers[:2]:
            server.restart()
        lease = taken(open_url(nodes.url))
        assert set(nodes.holding(RUN)) >= {2, 3, 4}
        store.free(lease)

    def test_renewal_puts_the_lock_back(self, nodes: Nodes, store: Store) -> None:
        """Otherwise a rolling restart of the nodes would cost every long lease its majority."""
        lease = taken_on_all(nodes, store)
        self.restart_one_by_one(nodes, store, lease)
        assert lease.held
        assert isinstance(acquire(open_url(nodes.url, BELIEVED)), Held)
        assert store.free(lease)
        until(lambda: nodes.holding(RUN) == [], "it is free")

    def restart_one_by_one(self, nodes: Nodes, store: Store, lease: Lease) -> None:
        run = inside.lock_key(KEY)
        until(lambda: len(nodes.holding(run)) == 5, "all nodes have it")
        for server in nodes.servers:
            server.restart()
            until(lambda: renewed(store, lease) and len(nodes.holding(run)) == 5, "it is on all nodes again")

    def test_node_that_is_farther_away_gets_the_lock_back(self) -> None:
        """The others have always answered before it does."""
        with Nodes(3, proxied=True) as nodes:
            store = open_url(nodes.url, BELIEVED)
            lease = taken_on_all(nodes, store)
            nodes.slow(2, 0.02)
            assert renewed(store, lease)  # The answer to what came before may be on its way.
            nodes.servers[2].client().delete(RUN)

            def is_everywhere() -> bool:
                assert store.renew([lease], timeout=LIMIT) == [True]
                clock.sleep(0.2)
                return len(nodes.holding(RUN)) == 3

            until(is_everywhere)
            store.close()

    def test_copy_finds_its_message_where_the_lock_was_put_back(self, nodes: Nodes, store: Store) -> None:
        """Otherwise a copy would be refused as another task."""
        lease = taken(store)
        self.restart_one_by_one(nodes, store, lease)
        refused = Record(ME.message, b"refused", 60.0)
        for found in (acquire(store), store.refuse(KEY, ME, refused)):
            assert isinstance(found, Held)
            assert found.holder == ME

    def test_frozen_child_keeps_its_lock(
        self, redis_server: RedisServer, shop_on: Callable[..., Shop], nodes: Nodes
    ) -> None:
        """Its main process renews it, and gives it back to the nodes that lack it."""
        shop = shop_on(
            redis_server,
            singleton_lock_backend=nodes.url,
            singleton_lock_transport_options=BELIEVED,
            singleton_lock_ttl=3.0,
        )
        shop.start("one")
        shop.send("exclusive", "report", 300.0)
        (run,) = shop.record.wait_for(starts=1)
        (lock,) = (key for key, _ in open_url(nodes.url, BELIEVED).all_held("singleton_lock:1"))
        clock.sleep(2.0)  # It reports within a second that it has the lock.
        os.kill(run.pid, signal.SIGSTOP)
        for server in nodes.servers:
            server.restart()
            until(lambda: len(nodes.holding(inside.lock_key(lock))) == 5, "it is on all nodes again")
        os.kill(run.pid, signal.SIGCONT)
        shop.record.let_end("report")

    def test_late_renewal_does_not_bring_a_freed_lock_back(self, nodes: Nodes, store: Store) -> None:
        lease = taken_on_all(nodes, store)
        store.free(lease)
        assert store.renew([lease], timeout=LIMIT) == [False]
        until(lambda: nodes.holding(RUN) == [], "it is free")

    def test_renewal_without_a_majority_does_not_count(self, nodes: Nodes, store: Store) -> None:
        lease = taken_on_all(nodes, store)
        for server in nodes.servers[:3]:
            server.flush()
        assert store.renew([lease], timeout=LIMIT) == [False]


class TestFences:
    def test_they_grow_when_nodes_come_back_with_older_data(self, nodes: Nodes, store: Store) -> None:
        store.free(taken(store))
        for server in nodes.servers:
            server.client().save()
        fences = []
        for first in range(5):
            for _ in range(20):
                lease = taken(store)
                fences.append(lease.fence)
                store.free(lease)
            for index in range(3):
                nodes.servers[(first + index) % 5].restart()
            until(lambda: released(store, acquire_or_none(store)), "the store is connected again")
        assert fences == sorted(set(fences))

    def test_they_grow_over_changing_majorities_with_a_stopped_clock(
        self, nodes: Nodes, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Then only the counters count, and any later majority knows the highest one."""
        monkeypatch.setattr(clock, "wall", lambda: 1000.0)
        fences = []
        for first in range(10):
            down = [nodes.servers[(first + index) % 5] for index in range(2)]
            for server in down:
                server.pause()
            found: list[object] = []
            # Nodes that were silent a moment ago are avoided for a while.
            until(lambda: found.append(acquire_or_none(store)) or isinstance(found[-1], Lease), "it is acquired")  # noqa: B023
            fences.append(found[-1].fence)
            until(lambda: released(store, found[-1]), "it is freed")  # noqa: B023
            for server in down:
                server.resume()
        assert fences == sorted(set(fences))


def released(store: Store, lease: object) -> bool:
    try:
        return isinstance(lease, Lease) and store.free(lease)
    except LockUnavailable:
        return False


def renewed(store: Store, lease: Lease) -> bool:
    try:
        return store.renew([lease], timeout=0.5) == [True]
    except LockUnavailable:
        return False


def acquire_for(store: Store, ttl: float) -> object:
    try:
        return acquire(store, ttl=ttl)
    except LockUnavailable:
        return None


class TestMarks:
    def test_record_is_found_by_any_majority(self, nodes: Nodes, store: Store) -> None:
        lease = taken(store, check_finished=True)
        for server in nodes.servers[:2]:
            server.kill()
        assert store.free(lease, record=Record(ME.message, b"record", 60))
        for server in nodes.servers[:2]:
            server.start()
        for server in nodes.servers[3:]:
            server.kill()
        # One node with the record is left, and two that were down when it was written.
        assert isinstance(acquire(open_url(nodes.url, BELIEVED), check_finished=True), Record)
        until(lambda: nodes.holding(RUN) == [], "the two nodes were told to undo it")

    def test_node_that_gets_it_later_forgets_it_with_the_others(
        self, nodes: Nodes, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """From the remaining time, a reader sees how long ago the body ended."""
        lease, late, now = taken_on_all(nodes, store), nodes.servers[:2], clock.now
        for server in late:
            server.client().save()
            server.kill()
        assert store.free(lease, record=Record(ME.message, b"record", 60))
        monkeypatch.setattr(clock, "now", lambda: now() + 20.0)
        for server in late:
            server.start()
        key = inside.record_key(KEY, ME.message)
        until(lambda: all(server.client().exists(key) for server in late), "they have the record")
        assert all(35_000 < pttl(server, key) <= 40_000 for server in late)
        assert all(40_000 < pttl(server, key) <= 60_000 for server in nodes.servers[2:])

    def test_lock_is_passed_on_to_the_next_attempt(self, nodes: Nodes, store: Store) -> None:
        following = Holder("my-task", 1)
        store.free(taken(store), reservation=Reservation(following, TTL))
        assert isinstance(acquire(store, holder=Holder("another")), Held)
        lease = taken(store, holder=following)
        assert store.free(lease)


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

    def test_copy_of_a_finished_message_wakes_the_next_waiter(
        self, nodes: Nodes, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The copy was woken for a lock that it does not take."""
        inside.set_seconds(monkeypatch, "of one wait of a waiter", 60.0)
        lease = taken(store, ttl=60, holder=ME)
        copy = LockRequest(KEY, new_owner(), ttl=TTL, holder=ME, waiting=True, check_finished=True)
        assert isinstance(store.acquire(copy), Held)
        found: list[object] = []

        def wait() -> None:
            with store.waiter(copy) as waiter:
                found.append(waiter.wait(60))

        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: blocked(nodes) == 1, "the copy waits")
        other = open_url(nodes.url, BELIEVED)
        behind, _ = self.wait_for(other, holder=Holder("another"))
        until(lambda: blocked(nodes) == 2, "and another task behind it")
        store.free(lease, record=Record(ME.message, b"", 60.0))
        thread.join(30)
        assert isinstance(found[0], Record)
        behind.join(30)
        assert not behind.is_alive()

    def test_nothing_is_left_of_waiters(self, nodes: Nodes, store: Store) -> None:
        lease = taken(store)
        waiters = [self.wait_for(store) for _ in range(3)]
        until(lambda: store.inspect(KEY).waiters == 3, "all wait")
        store.free(lease)
        for thread, _ in waiters:
            thread.join(30)
        eternal = [key for server in nodes.servers for key in server.client().scan_iter() if pttl(server, key) == -1]
        assert eternal == []


def pttl(server: RedisServer, key: str) -> int:
    return int(server.client().pttl(key))


def blocked(nodes: Nodes) -> int:
    return sum(server.client().info("clients")["blocked_clients"] for server in nodes.servers if server.pid)
