"""Replacing a waiting message, on each store but a Redlock: what a later step finds of an earlier one."""

from __future__ import annotations

import pytest

from celery_singleton_lock import LockSuperseded
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.keys.key import key_of_queue, key_of_text
from celery_singleton_lock.stores.base import Held, LockRequest
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.task import queue_lock, sending
from celery_singleton_lock.task.queue_lock import QueueLock

pytestmark = pytest.mark.parametrize("store", ["memory", "redis"], indirect=True)

KEY = key_of_queue(key_of_text("singleton_lock", "job", "1"))


def lock() -> QueueLock:
    return QueueLock(KEY, new_owner(), 100.0, 1, "until_executing")


def queue(store: Store, task_id: str = "old", ttl: float = 50.0) -> tuple[QueueLock, Held]:
    """A message that has the lock."""
    queued = lock()
    store.acquire(LockRequest(KEY, queued.owner, ttl=ttl, holder=Holder(task_id)))
    (held,) = store.held(KEY)
    return queued, held


def holders(store: Store) -> list[str | None]:
    return [held.holder.task_id for held in store.held(KEY) if held.holder is not None]


def test_newest_message_takes_over_and_supersedes_the_old_one(store: Store) -> None:
    old, found = queue(store)
    taken = sending.take_over(store, lock(), "new", found)
    assert holders(store) == ["new"]
    queue_lock.supersede(store, taken.lock, "new", [found.owner], found)
    assert not store.free(old.hold())
    assert isinstance(queue_lock.started(store, old), LockSuperseded)
    assert store.free(taken.lock.hold())


@pytest.mark.parametrize("order", ["starts first", "is given back first"])
def test_old_message_starts_when_the_newest_is_not_sent(store: Store, order: str) -> None:
    """Nobody is left to free the lock that it gets back."""
    old, found = queue(store)
    taken = sending.take_over(store, lock(), "new", found)
    assert not store.free(old.hold())
    if order == "starts first":
        assert queue_lock.started(store, old) is None
        sending.give_back(store, taken)
    else:
        sending.give_back(store, taken)
        assert queue_lock.started(store, old) is None
    assert holders(store) == []


def test_old_message_ends_without_a_start_when_the_newest_is_not_sent(store: Store) -> None:
    """It was revoked, or has expired: its worker gives the lock up."""
    old, found = queue(store)
    taken = sending.take_over(store, lock(), "new", found)
    store.abandon(old.hold())
    sending.give_back(store, taken)
    assert holders(store) == []


def test_superseded_message_of_the_same_id_is_known(store: Store) -> None:
    """The result is the newest message's: the old one must not store there that it was revoked."""
    old, found = queue(store, "same")
    taken = sending.take_over(store, lock(), "same", found)
    queue_lock.supersede(store, taken.lock, "same", [found.owner], found)
    why = queue_lock.started(store, old)
    assert isinstance(why, LockSuperseded)
    assert why.task_id == "same"
