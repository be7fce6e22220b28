"""Locks on a master that Sentinels replace, and on a cluster whose slots move and whose masters die."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from celery_singleton_lock import InvalidOption, Lock, LockUnavailable, Semaphore, clock
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
from tests.redis_server import RedisServer
from tests.servers import Cluster, SentinelGroup, until

KEY = "topology:{job:1}"

#: Seconds of leases: longer than a failover takes, also if the first election has no winner.
TTL = 60.0
ME = Holder("my-task", 0, "worker@host", 42, 1000.0)


def acquire(store: Store, key: str = KEY, **options: object) -> object:
    return store.acquire(LockRequest(key, new_owner(), ttl=TTL, holder=ME, **options))


def taken(store: Store, key: str = KEY, **options: object) -> Lease:
    lease = acquire(store, key, **options)
    assert isinstance(lease, Lease)
    return lease


def patiently_taken(store: Store, key: str = KEY) -> Lease:
    """Acquire like a task whose message is put back while the lock server is away."""
    found: list[object] = []

    def is_taken() -> bool:
        try:
            found.append(acquire(store, key))
        except LockUnavailable:
            return False
        return isinstance(found[-1], Lease)

    until(is_taken, "the lock is available")
    lease = found[-1]
    assert isinstance(lease, Lease)
    return lease


@pytest.fixture
def store_of_sentinels(sentinels: SentinelGroup) -> Iterator[Store]:
    store = open_url(sentinels.url, sentinels.options)
    yield store
    store.close()


class TestSentinel:
    @pytest.fixture
    def store(self, store_of_sentinels: Store) -> Store:
        return store_of_sentinels

    def test_lock_is_on_the_master(self, sentinels: SentinelGroup, store: Store) -> None:
        lease = taken(store)
        assert sentinels.master().client().exists(f"{KEY}:run")
        assert isinstance(acquire(store), Held)
        assert store.renew([lease], timeout=1.0) == [True]
        assert store.free(lease)

    def test_next_sentinel_is_asked_when_the_first_is_gone(self, sentinels: SentinelGroup) -> None:
        asked = []
        with socket.create_server(("127.0.0.1", 0)) as gone:
            hang_up = threading.Thread(target=lambda: [asked.append(gone.accept()[0].close()) for _ in range(2)])
            hang_up.start()
            store = open_url(f"sentinel://127.0.0.1:{gone.getsockname()[1]};{sentinels.url}", sentinels.options)
            assert store.free(taken(store))
            assert len(asked) == 1, "not over and over, with pauses"
            socket.create_connection(gone.getsockname()).close()
            hang_up.join(LIMIT)
        store.close()

    def test_master_name_is_needed(self, sentinels: SentinelGroup) -> None:
        with pytest.raises(InvalidOption, match="master_name"):
            open_url(sentinels.url)

    def test_unknown_master_is_reported(self, sentinels: SentinelGroup) -> None:
        store = open_url(sentinels.url, {"master_name": "nobody"})
        with pytest.raises(LockUnavailable, match="nobody"):
            acquire(store)


class TestFailover:
    @pytest.fixture
    def sentinels(self) -> Iterator[SentinelGroup]:
        """A group for each test, which breaks it."""
        with SentinelGroup() as group:
            yield group

    @pytest.fixture
    def store(self, store_of_sentinels: Store) -> Store:
        return store_of_sentinels

    def test_lock_outlives_a_failover(self, sentinels: SentinelGroup, store: Store) -> None:
        kept = Kept(store, taken(store, waiting=True))
        master = sentinels.master()
        assert replicated(master, 2)
        sentinels.fail_over()
        fence = kept.lease.fence
        until(lambda: renewed(store, kept.lease), "it is renewed on the new master")
        assert not kept.told.is_set()
        assert isinstance(acquire(store), Held)
        assert store.free(kept.lease)
        lease = taken(store)
        assert lease.fence > fence
        assert store.free(lease)


def replicated(master: RedisServer, replicas: int, *, key: str = "replicated") -> bool:
    """Wait until that many replicas have all writes."""
    with master.client() as client:
        client.set(key, 1, px=1)  # WAIT considers only writes of its own connection.
        return int(client.wait(replicas, 5000)) == replicas


def renewed(store: Store, lease: Lease) -> bool:
    try:
        return store.renew([lease], timeout=0.5) == [True]
    except LockUnavailable:
        return False


def released(store: Store, lease: Lease) -> bool:
    try:
        return store.free(lease)
    except LockUnavailable:
        return False


class TestCluster:
    @pytest.fixture
    def store(self, cluster: Cluster) -> Iterator[Store]:
        store = open_url(cluster.url)
        yield store
        store.close()

    def test_locks_are_spread_over_it(self, cluster: Cluster, store: Store) -> None:
        leases = [taken(store, f"many:{{job:{number}}}", waiting=True) for number in range(60)]
        masters = {cluster.master_of(lease.key).port for lease in leases}
        assert len(masters) == 3
        assert store.renew(leases, timeout=2.0) == [True] * 60
        assert {key for key, _ in store.all_held("many")} == {lease.key for lease in leases}
        assert all(store.free(lease, record=Record(ME.message, b"record", 60)) for lease in leases)
        assert isinstance(acquire(store, leases[7].key, check_finished=True), Record)

    def test_lock_moves_with_its_slot(self, cluster: Cluster, store: Store) -> None:
        lease = taken(store)
        new = cluster.migrate_slot(KEY)
        assert new.client().exists(f"{KEY}:run")
        assert isinstance(acquire(store), Held)
        assert store.renew([lease], timeout=1.0) == [True]
        assert store.free(lease)

    def test_lock_is_kept_while_its_slot_moves(self, cluster: Cluster, store: Store) -> None:
        """Its keys are on the old master, and missing keys would be created on the new one."""
        lease, other, released_ = taken(store), [taken(store, f"other:{{job:{number}}}") for number in range(20)], []
        releasing = threading.Thread(target=lambda: released_.append(store.free(lease)))

        def during() -> None:
            assert store.renew([lease, *other], timeout=1.0) == [True] * 21
            assert not isinstance(acquire_or_none(store), Lease)
            releasing.start()
            clock.sleep(0.2)
            assert not released_, "it waits for the end of the move"

        cluster.migrate_slot(KEY, during)
        releasing.join(30)
        assert released_ == [True]
        assert all(store.free(lease) for lease in other)

    @pytest.mark.parametrize("name", ["job}", "a{", "{}x", "a{b}c", "{{a}}", "}{", "{}{a}"])
    def test_lock_outside_of_tasks_may_have_any_name(self, cluster: Cluster, name: str) -> None:
        client = cluster.client()
        with Lock(client, name, timeout=TTL) as lock:
            assert lock.owned()
            assert client.get(name)
            assert not Lock(client, name).acquire(blocking_timeout=0.2)
        with Semaphore(client, name, 2, timeout=TTL), Semaphore(client, name, 2, timeout=TTL):
            assert not Semaphore(client, name, 2).acquire(blocking=False)
        assert client.get(name) is None

    def test_lock_outlives_its_master(self, cluster: Cluster, store: Store) -> None:
        kept = Kept(store, taken(store))
        others = [taken(store, f"other:{{job:{number}}}") for number in range(20)]
        assert replicated(cluster.master_of(KEY), 1, key=f"{KEY}:replicated")
        fence, dead = kept.lease.fence, cluster.fail_over(KEY)
        until(lambda: renewed(store, kept.lease), "it is renewed on the new master")
        assert not kept.told.is_set()
        kept.release()
        assert isinstance(acquire(store), Held)
        assert store.free(kept.lease)
        lease = patiently_taken(store)
        assert lease.fence > fence
        assert store.free(lease)
        until(lambda: all(released(store, other) or other.reason for other in others), "the others get freed")
        dead.start()
        until(lambda: dead.client().info("replication")["role"] == "slave", "the dead master is now a replica")

    def test_other_database_is_refused(self) -> None:
        with pytest.raises(InvalidOption, match="database 0 only"):
            open_url("redis+cluster://h:6379/1")

    def test_missing_nodes_are_reported(self) -> None:
        with pytest.raises(LockUnavailable, match="Connection"):
            acquire(open_url("redis+cluster://127.0.0.1:1"))


def acquire_or_none(store: Store) -> object:
    try:
        return acquire(store)
    except LockUnavailable:
        return None
