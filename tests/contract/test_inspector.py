"""What every store shows of its locks."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, LockRequest, Record, Reservation
from celery_singleton_lock.stores.store import KeyState, Store
from tests.contract.store_contract.asking import KEY, ME, TTL, taken, until_free
from tests.patience import until


def test_holds_are_found_by_prefix(store: Store) -> None:
    lease = taken(store, holder=ME)
    assert dict(store.all_held("another")) == {}
    ((key, held),) = store.all_held("contract")
    assert (key, held.holder, held.owner) == (KEY, ME, lease.owner)
    assert 0 < held.remaining <= TTL
    store.free(lease)
    assert dict(store.all_held("contract")) == {}


class TestKey:
    def test_unused_key_is_empty(self, store: Store) -> None:
        assert store.inspect(KEY) == KeyState((), None, 0, ())

    def test_held_lock_is_shown_with_its_holder_and_fence(self, store: Store) -> None:
        lease = taken(store, holder=ME)
        state = store.inspect(KEY)
        (held,) = state.held
        assert (held.holder, held.owner) == (ME, lease.owner)
        assert held.holder is not None
        assert held.holder.ttl == TTL, "the seconds that a renewal adds"
        assert (state.fence, state.waiters) == (lease.fence, 0)

    @pytest.mark.parametrize("store", ["memory", "redis"], indirect=True)
    def test_holders_of_a_semaphore_are_shown_in_their_order(self, store: Store) -> None:
        holders = [Holder(f"task-{number}") for number in range(3)]
        for holder in holders:
            store.acquire(LockRequest(KEY, new_owner(), ttl=TTL, holder=holder, limit=3))
        assert [held.holder for held in store.inspect(KEY).held] == holders

    def test_messages_that_were_carried_out_are_shown(self, store: Store) -> None:
        for message in ("one", "two"):
            store.free(taken(store, holder=ME), record=Record(message, b"record", 60.0))
            clock.sleep(0.01)
        records = store.inspect(KEY).records
        assert [(record.message, record.content) for record in records] == [("two", b"record"), ("one", b"record")], (
            "latest first"
        )
        assert all(0 < record.seconds <= 60 for record in records)

    def test_other_keys_are_not_shown(self, store: Store) -> None:
        odd = "contract:{job*[a-z]?\\:1}"
        for key in (KEY, f"{KEY}:run", odd.replace("*", "x")):
            store.acquire(LockRequest(key, new_owner(), ttl=TTL, holder=ME))
        assert store.inspect(odd).held == ()
        assert isinstance(store.acquire(LockRequest(odd, new_owner(), ttl=TTL, holder=ME)), Lease)
        assert len(store.inspect(odd).held) == 1
        assert len(store.inspect(KEY).held) == 1

    def test_lock_that_is_kept_for_a_message_is_renewed_by_nobody(self, store: Store) -> None:
        store.free(taken(store, holder=ME), reservation=Reservation(replace(ME, retries=3), TTL))
        (held,) = store.inspect(KEY).held
        assert held.holder is not None
        assert held.holder.ttl == 0


def test_waiters_are_counted_while_they_wait(store: Store) -> None:
    lease = taken(store, holder=ME)
    waiting = [threading.Thread(target=lambda: store.free(until_free(store))) for _ in range(3)]
    for waiter in waiting:
        waiter.start()
    until(lambda: store.inspect(KEY).waiters == 3, "all wait")
    assert [held.waiters for _, held in store.all_held("contract")] == [3]
    assert [held.waiters for held in store.held(KEY)] == [3]
    store.free(lease)
    for waiter in waiting:
        waiter.join(30)
    until(lambda: store.inspect(KEY).waiters == 0, "nobody waits")


def test_lock_that_was_freed_given_up_or_never_taken_is_not_held(store: Store) -> None:
    assert store.held(KEY) == []
    lease = taken(store)
    assert [held.owner for held in store.held(KEY)] == [lease.owner]
    store.abandon(lease)
    assert store.held(KEY) == []
    ghost = taken(store, holder=ME)
    lease = taken(store, holder=ME, given_up=[ghost.owner])
    assert [held.owner for held in store.held(KEY)] == [lease.owner]
    store.free(lease)
    assert store.held(KEY) == []


@pytest.mark.parametrize("store", ["memory", "redis"], indirect=True)
def test_holds_beyond_the_limit_are_shown(store: Store) -> None:
    for name in "abc":
        taken(store, holder=Holder(name), limit=3)
    assert len(store.held(KEY)) == 3
    assert len(list(store.all_held("contract"))) == 3


@pytest.mark.parametrize("store", ["memory", "redis"], indirect=True)
def test_attempt_that_was_kept_leaves_one_hold(store: Store) -> None:
    first = taken(store, limit=2)
    second, following = taken(store, holder=ME, limit=2), replace(ME, retries=3)
    store.free(second, reservation=Reservation(following, TTL))
    store.free(first)
    lease = taken(store, holder=following)
    assert [held.owner for held in store.held(KEY)] == [lease.owner]


def test_replaced_records_are_shown(store: Store) -> None:
    record = Record(ME.message, b"long record", 60.0)
    store.replace_records([(KEY, record)])
    assert store.inspect(KEY).records == (), "missing records are not created"
    store.free(taken(store), record=record)
    store.replace_records([(KEY, record._replace(content=b"short"))])
    (found,) = store.inspect(KEY).records
    assert found.content == b"short"
    assert 0 < found.seconds <= 60


class TestRecorded:
    """The record of a message, as other messages read it."""

    def test_message_without_a_record(self, store: Store) -> None:
        assert store.recorded(KEY, ME.message) is None
        lease = taken(store, holder=ME)
        assert store.recorded(KEY, ME.message) is None
        store.free(lease)
        assert store.recorded(KEY, ME.message) is None

    def test_record_that_was_written_with_the_release(self, store: Store) -> None:
        store.free(taken(store, holder=ME), record=Record(ME.message, b"record", 60.0))
        found = store.recorded(KEY, ME.message)
        assert found is not None
        assert (found.message, found.content) == (ME.message, b"record")
        assert 0 < found.seconds <= 60
        assert store.recorded(KEY, "another") is None

    def test_record_that_is_written_again_lasts_for_its_new_time(self, store: Store) -> None:
        lease = taken(store, holder=ME)
        for seconds in (30.0, 60.0):
            store.free(lease, record=Record(ME.message, b"record", seconds))
        found = store.recorded(KEY, ME.message)
        assert found is not None
        assert 30 < found.seconds <= 60

    def test_wake_frees_no_lock_and_takes_none(self, store: Store) -> None:
        store.wake(KEY)
        lease = taken(store, holder=ME)
        store.wake(KEY)
        assert isinstance(store.acquire(LockRequest(KEY, new_owner(), ttl=TTL, holder=Holder("other"))), Held)
        store.free(lease)
        store.free(taken(store, holder=ME))
