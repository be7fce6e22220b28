"""Our contestants. The only file of the benchmarks that knows how our locks are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from redis import Redis

from benchmarks.locks import TTL, Maker
from celery_singleton_lock import (
    Lock,
    Redlock,
    clock,
    process_identity,
)
from celery_singleton_lock.heartbeat import Heartbeat
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores import open_url
from celery_singleton_lock.stores.base import Held, LockRequest, Record
from celery_singleton_lock.stores.store import Store

#: How keys of ours end that are not a lock.
BESIDE = (":fence", ":waiting", ":wake", ":memory")

_RECORD = b'["SUCCESS", 3600.0, true]\nnull'


class _OfTask:
    """As a task does: each message has another id, gives an owner and a holder, and leaves a record."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, f"bench:{{{key}}}"
        self._holder = Holder(new_owner(), 0, "worker@host", 1, 0.0, process=process_identity.own())
        self._lease: Lease | None = None

    def acquire(self, wait: float) -> bool:
        owner, began = new_owner(), clock.now()
        how: dict[str, Any] = {"ttl": TTL, "holder": self._holder, "once": True}
        found = self._store.acquire(LockRequest(self._key, owner, **how, waiting=wait > 0))
        if wait and isinstance(found, Held):
            with self._store.waiter(LockRequest(self._key, owner, **how)) as turn:
                while isinstance(found, Held) and (left := began + wait - clock.now()) > 0:
                    found = turn.wait(left)
        if not isinstance(found, Lease):
            return False
        self._lease = found
        return True

    def release(self) -> None:
        assert self._lease is not None
        self._store.free(self._lease, record=Record(self._holder.message, _RECORD, 60.0))


class _Lock:
    """`Lock` and `Redlock`, which have the interface of redis-py's."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.release = lock.release

    def acquire(self, wait: float) -> bool:
        return bool(self._lock.acquire(blocking=wait > 0, blocking_timeout=wait or None))


def store(urls: Sequence[str]) -> Maker:
    """The store that tasks lock with."""
    redis_store = open_url(urls[0])
    return lambda name: _OfTask(redis_store, name)


def lock(urls: Sequence[str]) -> Maker:
    """`Lock`, for any program."""
    client = Redis.from_url(urls[0])
    return lambda name: _Lock(Lock(client, name, timeout=TTL))


def redlock(urls: Sequence[str]) -> Maker:
    """`Redlock`, over several servers."""
    clients = [Redis.from_url(url) for url in urls]
    # The nodes were started a moment ago, and would have no vote for one ttl.
    return lambda name: _Lock(Redlock(clients, name, timeout=TTL, restart_delay=False))


class _Execution:
    """What holds a lease in a worker: the heartbeat tells it when that is lost."""

    __slots__ = ("__weakref__", "lease")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def on_lost(self) -> None:
        """Nothing to stop here."""


def hold_leases(url: str, count: int) -> Callable[[], int]:
    """Hold `count` leases, renewed by one heartbeat, as a worker's tasks do. Returns how many are held when asked."""
    redis_store = open_url(url)
    heartbeat = Heartbeat(redis_store)
    executions = []
    for number in range(count):
        holder = Holder(new_owner(), 0, "worker@host", 1, 0.0, process=process_identity.own())
        lease = redis_store.acquire(LockRequest(f"bench:{{{number}}}", new_owner(), ttl=TTL, holder=holder))
        assert isinstance(lease, Lease)
        executions.append(_Execution(lease))
        heartbeat.start(lease, executions[-1].on_lost)
    return lambda: sum(execution.lease.held for execution in executions)


def hold_locks(url: str, count: int) -> Callable[[], int]:
    """Hold `count` objects of `Lock`, which renews them by itself."""
    make = lock([url])
    locks = [make(str(number)) for number in range(count)]
    for one in locks:
        assert one.acquire(0)
    client = Redis.from_url(url, decode_responses=True)
    # By the server: what is not renewed is gone after the ttl. `locks` is kept, since who lets go of one may free it.
    return lambda: min(len(locks), sum(map(is_lock, client.scan_iter(count=1000))))


def is_lock(key: str) -> bool:
    """Whether a key on a server is a lock, not what stays beside it."""
    return not key.endswith(BESIDE) and ":done:" not in key and ":over:" not in key
