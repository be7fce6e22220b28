"""What every store promises; one suite for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, LockRequest, Record, Reservation
from celery_singleton_lock.stores.inspector import KeyState
from celery_singleton_lock.stores.store import Store

KEY = "contract:{job:1}"
TTL = 5.0
#: The shortest that is useful: long enough to acquire and renew in, short enough to wait for.
SHORT = 0.2
ME = Holder("my-task", 2, "worker@host", 42, 1000.0)


def acquire(store: Store, *, ttl: float = TTL, owner: str | None = None, waiting: bool = False) -> Lease | Held:
    return store.acquire(LockRequest(KEY, owner or new_owner(), ttl=ttl, holder=ME, waiting=waiting))


def taken(store: Store, *, ttl: float = TTL) -> Lease:
    lease = acquire(store, ttl=ttl)
    assert isinstance(lease, Lease)
    return lease


def until_free(store: Store) -> Lease:
    """Wait as an execution does, and take the lock."""
    request = LockRequest(KEY, new_owner(), ttl=TTL, holder=ME, waiting=True)
    with store.waiter(request) as waiter:
        found = store.acquire(request)
        while isinstance(found, Held):
            found = waiter.wait(found.remaining + 0.002)
    assert isinstance(found, Lease)
    return found


def test_free_lock_is_taken(store: Store) -> None:
    lease = taken(store)
    assert lease.held
    assert lease.fence > 0
    assert 0 < lease.remaining < TTL


def test_held_lock_is_refused_and_names_its_holder(store: Store) -> None:
    taken(store)
    found = acquire(store)
    assert isinstance(found, Held)
    assert found.holder == ME
    assert 0 < found.remaining <= TTL


def test_another_key_is_free(store: Store) -> None:
    taken(store)
    assert isinstance(store.acquire(LockRequest(f"{KEY}2", new_owner(), ttl=SHORT, holder=ME)), Lease)


def test_acquire_is_idempotent_by_owner(store: Store) -> None:
    owner = new_owner()
    first, second = acquire(store, owner=owner), acquire(store, owner=owner)
    assert isinstance(first, Lease)
    assert isinstance(second, Lease)
    assert second.fence >= first.fence


def test_released_lock_is_free(store: Store) -> None:
    assert store.free(taken(store))
    assert isinstance(acquire(store), Lease)


def test_second_release_frees_nothing(store: Store) -> None:
    lease = taken(store)
    store.free(lease)
    taken(store)
    assert not store.free(lease)
    assert isinstance(acquire(store), Held)


def test_stranger_frees_nothing(store: Store) -> None:
    lease = taken(store)
    stranger = Lease(KEY, new_owner(), ttl=TTL, fence=1, sent_at=clock.now())
    assert not store.free(stranger)
    assert store.renew([stranger], timeout=1) == [False]
    assert store.renew([lease], timeout=1) == [True]


def test_lease_ends_by_itself(store: Store) -> None:
    taken(store, ttl=SHORT)
    assert until_free(store).held


def test_holder_stops_trusting_before_others_can_acquire(store: Store) -> None:
    lease = taken(store, ttl=SHORT)
    until_free(store)
    assert not lease.held


def test_renewed_lease_lasts(store: Store) -> None:
    lease = taken(store, ttl=SHORT)
    end = lease.trusted_until
    clock.sleep(SHORT / 2)
    assert store.renew([lease], timeout=1) == [True]
    assert lease.trusted_until > end
    clock.sleep(SHORT * 0.7)
    assert isinstance(acquire(store), Held)


def test_ended_lease_is_not_renewed(store: Store) -> None:
    lease = taken(store, ttl=SHORT)
    until = until_free(store)
    assert store.renew([lease, until], timeout=1) == [False, True]


def test_freed_lease_is_not_brought_back_by_a_late_renewal(store: Store) -> None:
    lease = taken(store)
    store.free(lease)
    assert store.renew([lease], timeout=1) == [False]
    assert isinstance(acquire(store), Lease)


def test_many_leases_are_renewed_at_once(store: Store) -> None:
    leases = [store.acquire(LockRequest(f"many:{{{n}}}", new_owner(), ttl=TTL, holder=ME)) for n in range(450)]
    held = [lease for lease in leases if isinstance(lease, Lease)]
    assert store.renew(held, timeout=1) == [True] * 450
    for lease in held:
        store.free(lease)


def test_fences_grow(store: Store) -> None:
    fences = []
    for _ in range(20):
        lease = taken(store)
        fences.append(lease.fence)
        store.free(lease)
    assert fences == sorted(set(fences))


def test_fence_grows_over_an_ended_lease(store: Store) -> None:
    first = taken(store, ttl=SHORT)
    assert until_free(store).fence > first.fence


def test_release_wakes_a_waiter(store: Store) -> None:
    lease = taken(store)
    got: list[Lease] = []
    waiter = threading.Thread(target=lambda: got.append(until_free(store)))
    waiter.start()
    started = clock.now()
    store.free(lease)
    waiter.join(TTL)
    assert got
    assert got[0].fence > lease.fence
    assert clock.now() - started < TTL / 2, "it was its lease's end that woke the waiter, not the release"


def test_every_waiter_gets_its_turn(store: Store) -> None:
    lease = taken(store)
    got: list[int] = []

    def turn() -> None:
        mine = until_free(store)
        got.append(mine.fence)
        store.free(mine)

    waiters = [threading.Thread(target=turn) for _ in range(8)]
    for waiter in waiters:
        waiter.start()
    store.free(lease)
    for waiter in waiters:
        waiter.join(30)
    assert len(got) == 8
    assert got == sorted(got)


def test_no_update_is_lost(store: Store) -> None:
    """The fuzz: threads raise an unguarded counter under the lock; the sum must be right."""
    threads, rounds, counter = 6, 25, [0]

    def work() -> None:
        for _ in range(rounds):
            lease = until_free(store)
            value = counter[0]
            clock.sleep(0)
            counter[0] = value + 1
            assert store.free(lease)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert counter == [threads * rounds]


class TestMark:
    MARK = Record(ME.message, b"record\n\x00\xff", 60.0)

    def acquire_once(self, store: Store, holder: Holder = ME) -> Lease | Held | Record:
        return store.acquire(LockRequest(KEY, new_owner(), ttl=TTL, holder=holder, once=True))

    def test_copy_of_a_done_message_is_told_so_and_takes_no_lock(self, store: Store) -> None:
        store.free(taken(store), record=self.MARK)
        done = self.acquire_once(store)
        assert isinstance(done, Record)
        assert done.content == self.MARK.content
        assert 0 < done.seconds <= 60
        assert isinstance(acquire(store), Lease)

    def test_copy_is_told_so_also_while_another_holds_the_lock(self, store: Store) -> None:
        store.free(taken(store), record=self.MARK)
        taken(store)
        assert isinstance(self.acquire_once(store), Record)

    @pytest.mark.parametrize("change", [{"sending": "other"}, {"retries": 3}, {"replaced": 1}])
    def test_other_messages_are_not_done(self, store: Store, change: dict[str, object]) -> None:
        store.free(taken(store), record=self.MARK)
        assert isinstance(self.acquire_once(store, replace(ME, **change)), Lease)

    def test_another_process_is_still_the_same_message(self, store: Store) -> None:
        store.free(taken(store), record=self.MARK)
        assert isinstance(self.acquire_once(store, Holder(ME.task_id, ME.retries, "elsewhere", 7)), Record)

    def test_mark_is_left_also_when_the_lock_was_lost(self, store: Store) -> None:
        lease = taken(store)
        store.free(lease)
        taken(store)
        assert not store.free(lease, record=self.MARK)
        assert isinstance(self.acquire_once(store), Record)
        assert isinstance(acquire(store), Held)

    def test_mark_is_forgotten(self, store: Store) -> None:
        store.free(taken(store), record=self.MARK._replace(seconds=SHORT))
        assert isinstance(self.acquire_once(store), Record)
        while isinstance(self.acquire_once(store), Record):
            clock.sleep(SHORT / 10)

    def test_later_mark_replaces_the_first(self, store: Store) -> None:
        lease = taken(store)
        store.free(lease, record=self.MARK)
        store.free(lease, record=self.MARK._replace(content=b"second"))
        done = self.acquire_once(store)
        assert isinstance(done, Record)
        assert done.content == b"second"


class TestHeir:
    NEXT = Holder("my-task", 3)

    def pass_on(self, store: Store, seconds: float = TTL) -> Lease:
        lease = taken(store)
        assert store.free(lease, reservation=Reservation(self.NEXT, seconds))
        return lease

    def test_only_the_next_attempt_gets_it(self, store: Store) -> None:
        lease = self.pass_on(store)
        found = acquire(store)
        assert isinstance(found, Held)
        assert found.holder == self.NEXT
        heir = store.acquire(LockRequest(KEY, new_owner(), ttl=TTL, holder=replace(self.NEXT, pid=99)))
        assert isinstance(heir, Lease)
        assert heir.fence > lease.fence
        assert isinstance(acquire(store), Held)
        assert store.free(heir)
        assert isinstance(acquire(store), Lease)

    def test_two_copies_of_the_next_attempt_do_not_both_get_it(self, store: Store) -> None:
        self.pass_on(store)
        assert isinstance(store.acquire(LockRequest(KEY, new_owner(), ttl=TTL, holder=self.NEXT)), Lease)
        assert isinstance(store.acquire(LockRequest(KEY, new_owner(), ttl=TTL, holder=self.NEXT)), Held)

    def test_it_does_not_wait_for_ever(self, store: Store) -> None:
        self.pass_on(store, SHORT)
        assert until_free(store).held

    def test_lost_lock_is_not_passed_on(self, store: Store) -> None:
        lease = taken(store)
        store.free(lease)
        taken(store)
        assert not store.free(lease, reservation=Reservation(self.NEXT, TTL))
        assert isinstance(store.acquire(LockRequest(KEY, new_owner(), ttl=TTL, holder=self.NEXT)), Held)

    def test_waiting_heir_is_woken(self, store: Store) -> None:
        lease, found = taken(store, ttl=60.0), []
        request = LockRequest(KEY, new_owner(), ttl=60.0, holder=self.NEXT, waiting=True)
        assert isinstance(store.acquire(request), Held)

        def wait() -> None:
            with store.waiter(request) as waiter:
                while not found or isinstance(found[-1], Held):
                    found.append(waiter.wait(60.0))

        waited = threading.Thread(target=wait)
        waited.start()
        clock.sleep(SHORT / 2)
        store.free(lease, reservation=Reservation(self.NEXT, 60.0))
        waited.join(30)
        assert isinstance(found[-1], Lease)


def test_holds_are_found_by_prefix(store: Store) -> None:
    lease = taken(store)
    assert dict(store.all_held("another")) == {}
    ((key, held),) = store.all_held("contract")
    assert (key, held.holder, held.owner) == (KEY, ME, lease.owner)
    assert 0 < held.remaining <= TTL
    store.free(lease)
    assert dict(store.all_held("contract")) == {}


class TestSight:
    def test_of_a_key_that_nobody_ever_used(self, store: Store) -> None:
        assert store.inspect(KEY) == KeyState((), None, 0, ())

    def test_of_a_held_lock(self, store: Store) -> None:
        lease = taken(store)
        sight = store.inspect(KEY)
        (held,) = sight.held
        assert (held.holder, held.owner, held.slot) == (ME, lease.owner, 0)
        assert held.holder is not None
        assert held.holder.ttl == TTL, "what a renewal is good for"
        assert (sight.fence, sight.waiters) == (lease.fence, 0)

    def test_of_each_slot_of_a_semaphore_in_order(self, store: Store) -> None:
        holders = [Holder(f"task-{number}") for number in range(3)]
        for holder in holders:
            store.acquire(LockRequest(KEY, new_owner(), ttl=TTL, holder=holder, limit=3))
        assert [(held.slot, held.holder) for held in store.inspect(KEY).held] == [*enumerate(holders)]

    def test_has_the_messages_that_were_carried_out(self, store: Store) -> None:
        for message in ("one", "two"):
            store.free(taken(store), record=Record(message, b"record", 60.0))
            clock.sleep(0.01)
        marks = store.inspect(KEY).records
        assert [(mark.message, mark.content) for mark in marks] == [("two", b"record"), ("one", b"record")], (
            "latest first"
        )
        assert all(0 < mark.seconds <= 60 for mark in marks)

    def test_has_nothing_of_other_keys(self, store: Store) -> None:
        odd = "contract:{job*[a-z]?\\:1}"
        for key in (KEY, f"{KEY}:run", odd.replace("*", "x")):
            store.acquire(LockRequest(key, new_owner(), ttl=TTL, holder=ME))
        assert store.inspect(odd).held == ()
        assert isinstance(store.acquire(LockRequest(odd, new_owner(), ttl=TTL, holder=ME)), Lease)
        assert len(store.inspect(odd).held) == 1
        assert len(store.inspect(KEY).held) == 1

    def test_lock_that_is_kept_for_a_message_is_renewed_by_nobody(self, store: Store) -> None:
        store.free(taken(store), reservation=Reservation(replace(ME, retries=3), TTL))
        (held,) = store.inspect(KEY).held
        assert held.holder is not None
        assert held.holder.ttl == 0


def test_waiters_are_counted_while_they_wait(store: Store) -> None:
    lease = taken(store)
    waiting = [threading.Thread(target=lambda: store.free(until_free(store))) for _ in range(3)]
    for waiter in waiting:
        waiter.start()
    wait_for(lambda: store.inspect(KEY).waiters == 3)
    assert [held.waiters for _, held in store.all_held("contract")] == [3]
    assert [held.waiters for held in store.held(KEY)] == [3]
    store.free(lease)
    for waiter in waiting:
        waiter.join(30)
    wait_for(lambda: store.inspect(KEY).waiters == 0)


def wait_for(true: Callable[[], bool]) -> None:
    deadline = clock.now() + 30
    while not true():
        assert clock.now() < deadline
        clock.sleep(0.01)
