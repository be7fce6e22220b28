"""Which node of a cluster is asked, where nodes leave, lose each other, and give slots away.

A proxy for each node, all before one server: what the cluster is, they say.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

import pytest
from redis.crc import key_slot

from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import Held, LockRequest, Record
from celery_singleton_lock.stores.store import Place, Store
from tests.contract import inside
from tests.contract.conftest import blocked
from tests.contract.forging import ForgingProxy
from tests.patience import LIMIT, until
from tests.redis_server import RedisServer

KEY = "contract:{cluster:1}"
TTL = 300.0
ME = Holder("me")
RECORD = Record(ME.message, b"record", 60.0)

#: In the first half of the slots; the other lock is in the second one.
OTHER, HALF = "contract:{cluster:2}", 8192

MAP, SCRIPT, ANYTHING = b"CLUSTER", b"EVAL", KEY.encode()
DOWN = b"-CLUSTERDOWN The cluster is down\r\n"


def mapped(*nodes: ForgingProxy) -> bytes:
    """That the first node has all slots, and the others are its replicas."""
    named = b"".join(b"*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % node.port for node in nodes)
    return b"*1\r\n*%d\r\n:0\r\n:16383\r\n" % (2 + len(nodes)) + named


def mapped_by_halves(*nodes: ForgingProxy) -> bytes:
    """That each of two nodes has one half of the slots."""
    halves = ((0, HALF - 1), (HALF, 16383))
    each = (
        b"*3\r\n:%d\r\n:%d\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % (*half, node.port)
        for half, node in zip(halves, nodes, strict=True)
    )
    return b"*2\r\n" + b"".join(each)


@pytest.fixture
def nodes(redis_server: RedisServer) -> Iterator[Sequence[ForgingProxy]]:
    """Each knows all of them; the first is the master."""
    nodes = [ForgingProxy(redis_server.port) for _ in range(3)]
    for node in nodes:
        node.forge(MAP, mapped(*nodes))
    yield nodes
    for node in nodes:
        node.__exit__()


@pytest.fixture
def store(nodes: Sequence[ForgingProxy]) -> Iterator[Store]:
    with closing(open_url(";".join(f"redis+cluster://127.0.0.1:{node.port}" for node in nodes))) as store:
        yield store


def asked(**more: object) -> LockRequest:
    return LockRequest(KEY, new_owner(), ttl=TTL, holder=ME, **more)  # type: ignore[arg-type]


def taken(store: Store) -> Lease:
    lease = store.acquire(asked())
    assert isinstance(lease, Lease)
    return lease


def replace(nodes: Sequence[ForgingProxy], answer: bytes = DOWN) -> None:
    """The first has lost the others, which have replaced it; clients reach them all."""
    nodes[0].forge(ANYTHING, answer)
    for node in nodes[1:]:
        node.forge(MAP, mapped(nodes[1], nodes[0], nodes[2]))


def is_renewed(store: Store, lease: Lease) -> bool:
    with suppress(LockUnavailable):
        return store.renew([lease], timeout=1.0) == [True]
    return False


def test_node_that_has_left_is_not_asked_for_the_map(nodes: Sequence[ForgingProxy], store: Store) -> None:
    """It may still be the first one in the URL."""
    nodes[0].forge(MAP, b"*0\r\n")
    for node in nodes[1:]:
        node.forge(MAP, mapped(nodes[1], nodes[2]))
    assert taken(store)


def test_question_finds_the_new_master(nodes: Sequence[ForgingProxy], store: Store) -> None:
    store.free(taken(store))
    replace(nodes)
    assert taken(store)


def test_look_finds_the_new_master(nodes: Sequence[ForgingProxy], store: Store) -> None:
    """A program may do nothing else."""
    lease = taken(store)
    replace(nodes)
    assert [held.owner for held in store.held(KEY)] == [lease.owner]


def test_renewal_finds_the_new_master(nodes: Sequence[ForgingProxy], store: Store) -> None:
    lease = taken(store)
    replace(nodes)
    assert is_renewed(store, lease) or is_renewed(store, lease)


def test_waiter_finds_the_new_master(nodes: Sequence[ForgingProxy], store: Store) -> None:
    lease, request = taken(store), asked(waiting=True)
    assert isinstance(store.acquire(request), Held)
    with store.waiter(request) as waiter:
        assert isinstance(waiter.wait(0.01), Held)
        replace(nodes)
        nodes[0].cut()
        store.free(lease)
        while isinstance(found := waiter.wait(60), Held):
            pass
        assert isinstance(found, Lease)


def test_new_master_hears_of_the_end_before_it_is_asked(
    nodes: Sequence[ForgingProxy], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = taken(store)
    inside.repeat_nothing(monkeypatch, store)
    for node in nodes:
        node.forge(SCRIPT, DOWN)
    with pytest.raises(LockUnavailable):
        store.free(lease, record=RECORD)
    for node in nodes:
        node.be_honest()
        node.forge(MAP, mapped(*nodes))
    assert store.held(OTHER) == []  # The first one is the master, as far as is known.
    replace(nodes)
    assert isinstance(store.acquire(asked(check_finished=True)), Record)


def test_slot_that_has_moved_is_followed(nodes: Sequence[ForgingProxy], store: Store) -> None:
    lease = taken(store)
    nodes[0].forge(ANYTHING, b"-MOVED %d 127.0.0.1:%d\r\n" % (key_slot(ANYTHING), nodes[1].port))
    assert is_renewed(store, lease)
    assert [held.owner for held in store.held(KEY)] == [lease.owner]
    assert store.free(lease)
    assert taken(store)


def test_slot_that_moves_in_a_circle_is_an_error(nodes: Sequence[ForgingProxy], store: Store) -> None:
    for node, other in ((nodes[0], nodes[1]), (nodes[1], nodes[0])):
        node.forge(ANYTHING, b"-MOVED %d 127.0.0.1:%d\r\n" % (key_slot(ANYTHING), other.port))
    with pytest.raises(LockUnavailable):
        store.acquire(asked())


@pytest.mark.parametrize("how", ["silent", "down"])
def test_node_that_is_away_does_not_hold_up_the_locks_of_another(
    nodes: Sequence[ForgingProxy], store: Store, redis_server: RedisServer, how: str
) -> None:
    """Where a process waits for locks on both."""
    assert key_slot(OTHER.encode()) < HALF <= key_slot(KEY.encode())
    for node in nodes:
        node.forge(MAP, mapped_by_halves(nodes[1], nodes[0]))
    taken(store)
    lease = store.acquire(LockRequest(OTHER, new_owner(), ttl=TTL, holder=ME))
    assert isinstance(lease, Lease)
    places = [Place(key, new_owner(), 1000.0, 1, 1) for key in (OTHER, KEY)]
    heard = threading.Event()
    store.mailbox.expect(OTHER, places[0].name, heard.set)
    assert store.look(places) == [0, 0]
    until(blocked(redis_server))
    if how == "silent":
        nodes[0].hold(commands=True, replies=True)
    else:
        nodes[0].forge(ANYTHING, DOWN)
    nodes[0].cut()
    assert store.free(lease)
    assert heard.wait(LIMIT)
    nodes[0].let_through()
    store.mailbox.forget(places[0].name)


def test_nodes_that_have_no_answer_are_asked_last(nodes: Sequence[ForgingProxy], store: Store) -> None:
    """Those that were lost together show an old map, and come first in it; each question would take a second."""
    store.free(taken(store))
    for node in nodes[:2]:
        node.forge(ANYTHING, DOWN)
    nodes[2].forge(MAP, mapped(nodes[2]))
    until(lambda: is_taken(store))
    before = sum(node.answered for node in nodes[:2])
    for _ in range(3):
        assert is_taken(store)
    assert sum(node.answered for node in nodes[:2]) == before


def is_taken(store: Store) -> bool:
    with suppress(LockUnavailable):
        return bool(store.free(taken(store)))
    return False
