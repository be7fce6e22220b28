"""`celery locks` with locks on a Redlock, on a master that Sentinels know, or on a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import key_of_text
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import LockRequest, Record
from celery_singleton_lock.stores.store import Store
from tests.integration.conftest import Shop
from tests.integration.operators import ask
from tests.redis_server import RedisServer
from tests.servers import Cluster, Nodes, SentinelGroup
from tests.unit.test_verdict import over

#: Enough locks that each master of a cluster has some.
COUNT = 30


@pytest.fixture
def shop(group: Nodes | SentinelGroup | Cluster, redis_server: RedisServer, shop_on: Any) -> Shop:
    options = {"restart_delay": False} if isinstance(group, Nodes) else getattr(group, "options", {})
    made: Shop = shop_on(redis_server, singleton_lock_backend=group.url, singleton_lock_transport_options=options)
    return made


@pytest.fixture
def store(shop: Shop) -> Iterator[Store]:
    store = open_url(shop.conf["singleton_lock_backend"], shop.conf["singleton_lock_transport_options"])
    yield store
    store.close()


def key_of(number: int) -> str:
    return key_of_text("singleton_lock", "job", str(number))


def taken(store: Store, number: int, **options: Any) -> Lease:
    holder = Holder(f"task {number}", node="one@test", pid=7, since=clock.wall(), **options)
    lease = store.acquire(LockRequest(key_of(number), new_owner(), ttl=60.0, holder=holder))
    assert isinstance(lease, Lease)
    return lease


def test_all_locks_are_listed_shown_and_freed(shop: Shop, store: Store) -> None:
    gone = over()
    for number in range(COUNT):
        taken(store, number, process=gone)
    store.free(taken(store, COUNT), record=Record("id:0.0", b"record", 60.0))
    last = taken(store, COUNT)

    listed = [json.loads(line) for line in ask(shop, "list", "--json").stdout.splitlines()]
    assert {line["key"] for line in listed} == {key_of(number) for number in range(COUNT + 1)}
    assert len(listed) == COUNT + 1
    assert all(line["ttl"] == 60.0 and 0 < line["expires_in"] <= 60 for line in listed)

    shown = json.loads(ask(shop, "show", "--json", last.key).stdout)
    assert [line["task_id"] for line in shown["held"]] == [f"task {COUNT}"]
    assert (shown["fence"], [mark["message"] for mark in shown["done"]]) == (last.fence, ["id:0.0"])

    assert (
        ask(shop, "clear", "--node", "one@test", "--older-than", "0", "--task", "job", "--force", "--yes").exit_code
        == 0
    )
    assert ask(shop, "list", "--json").stdout == ""
    assert store.renew([last], timeout=1.0) == [False]


def test_lock_of_a_dead_process_is_recognized(shop: Shop, store: Store) -> None:
    taken(store, 1, process=over())
    freed = ask(shop, "release", key_of(1), "--yes", "--json")
    assert (freed.exit_code, json.loads(freed.stdout)["why"]) == (0, "the process that held it is gone")
    assert isinstance(taken(store, 1), Lease)
