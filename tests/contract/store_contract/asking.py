"""The callers in the contract, their locks, and how they ask."""

from __future__ import annotations

from typing import Any

from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, LockRequest, Record
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.stores.waiters import Waiter

KEY = "contract:{job:1}"

#: In seconds; longer than any test, so that a lock is free only if it was freed.
TTL = 300.0

#: A lease that is short enough to wait for its end, and longer than a busy machine stops a process for.
SHORT = 0.8

#: Seconds after which a test that waits for something fails.
PATIENCE = 60.0

ME = Holder("my-task", 2, "worker@host", 42, 1000.0)
OTHER = Holder("other", 0, "elsewhere", 7, 1.0, label='tenant="ä"')


def request(owner: str = "", **more: Any) -> LockRequest:
    """A request for the lock, by another task unless a holder is given."""
    return LockRequest(more.pop("key", KEY), owner or new_owner(), **{"ttl": TTL, "holder": OTHER, **more})


def ask(store: Store, owner: str = "", **more: Any) -> Lease | Held | Record:
    """Acquire the lock; see `request`."""
    return store.acquire(request(owner, **more))


def taken(store: Store, owner: str = "", **more: Any) -> Lease:
    """A lease of the lock, which must be free."""
    lease = ask(store, owner, **more)
    assert isinstance(lease, Lease)
    return lease


def is_free(store: Store, limit: int = 1) -> bool:
    """Whether a newcomer gets the lock."""
    found = ask(store, holder=Holder("passer-by"), limit=limit)
    return isinstance(found, Lease) and bool(store.free(found))


def is_of(found: object, lease: Lease) -> bool:
    """Whether the lock is held by this lease's owner; on a Redlock, an owner token is known by its beginning."""
    return isinstance(found, Held) and found.owner == lease.owner


def waited_for(waiter: Waiter) -> Lease | Record:
    """What a waiter finally gets."""
    found = waiter.wait(PATIENCE)
    while isinstance(found, Held):
        found = waiter.wait(min(PATIENCE, found.remaining + 0.002))
    return found


def until_free(store: Store, **more: Any) -> Lease:
    """Wait for the lock as an execution does, and take it."""
    asked = request(**{"waiting": True, **more})
    with store.waiter(asked) as waiter:
        found = store.acquire(asked)
        if isinstance(found, Held):
            found = waiter.wait(found.remaining + 0.002)
        if isinstance(found, Held):
            found = waited_for(waiter)
    assert isinstance(found, Lease)
    return found
