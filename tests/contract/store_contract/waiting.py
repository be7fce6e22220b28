"""Places in the queue of a lock."""

from __future__ import annotations

import threading
from typing import Any

from celery_singleton_lock import clock
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.stores.store import Store
from celery_singleton_lock.stores.waiters import Waiter
from tests.contract.store_contract.asking import (
    ME,
    PATIENCE,
    TTL,
    ask,
    is_free,
    is_of,
    request,
    taken,
    until_free,
    waited_for,
)


def place(store: Store, **more: Any) -> Waiter:
    """A place in the queue, after an acquire that found the lock held."""
    asked = request(**{"holder": ME, "waiting": True, **more})
    assert isinstance(store.acquire(asked), Held)
    return store.waiter(asked)


class WaitingContract:
    """A waiter gets the lock when it is freed, and does not wait for its lease to end."""

    def test_freed_lock_goes_to_the_waiter(self, store: Store) -> None:
        first = taken(store)
        with place(store) as waiter:
            threading.Timer(0.05, store.free, [first]).start()
            found = waited_for(waiter)
        assert isinstance(found, Lease)
        assert found.fence > first.fence
        assert found.remaining > TTL * 0.9
        assert store.renew([found], timeout=1) == [True]
        assert store.free(found)
        assert is_free(store)

    def test_waiter_sees_that_the_lock_is_held(self, store: Store) -> None:
        first = taken(store)
        with place(store) as waiter:
            assert is_of(waiter.wait(0.05), first)
        assert store.free(first)
        assert is_free(store), "a waiter that has left does not get the lock"

    def test_waiter_sees_that_the_lease_has_ended(self, store: Store) -> None:
        taken(store, ttl=0.3)
        with place(store) as waiter:
            # Nobody wakes the waiter: it asks when the lease should have ended.
            while isinstance(found := waiter.wait(0.1), Held):
                pass
            assert isinstance(found, Lease)

    def test_lease_that_was_found_while_waiting_is_kept(self, store: Store) -> None:
        """A wake-up that the server still sends to the waiter takes nothing away."""
        taken(store, ttl=0.2)
        with place(store) as waiter:
            while not isinstance(found := waiter.wait(0.05), Lease):
                pass
        assert is_of(ask(store), found)
        assert store.free(found)
        assert is_free(store)

    def test_lease_that_was_asked_for_is_kept(self, store: Store) -> None:
        """A waiter asks by itself when it finds the holder's process gone."""
        first = taken(store)
        with place(store) as waiter:
            assert isinstance(waiter.wait(0.05), Held)
            store.free(first)
            found = waiter.ask()
        assert isinstance(found, Lease)
        assert store.renew([found], timeout=1) == [True]

    def test_waiter_finds_the_record_of_a_message_that_was_carried_out_meanwhile(self, store: Store) -> None:
        first = taken(store, holder=ME)
        with place(store, check_finished=True) as waiter:
            record = Record(ME.message, b"done", 60.0)
            threading.Timer(0.05, lambda: store.free(first, record=record)).start()
            assert isinstance(waited_for(waiter), Record)
        assert is_free(store)

    def test_waiter_is_woken_long_before_the_lease_would_end(self, store: Store) -> None:
        lease, got = taken(store), []
        waits = threading.Thread(target=lambda: got.append(until_free(store)))
        waits.start()
        began = clock.now()
        store.free(lease)
        waits.join(PATIENCE)
        assert got[0].fence > lease.fence
        assert clock.now() - began < 2.5

    def test_first_come_first_served(self, store: Store) -> None:
        lease = taken(store)
        order: list[int] = []

        def wait(number: int, ready: threading.Event) -> None:
            with place(store, holder=Holder(f"task {number}")) as waiter:
                ready.set()
                found = waited_for(waiter)
                assert isinstance(found, Lease)
                order.append(number)
            store.free(found)

        threads = []
        for number in range(5):
            ready = threading.Event()
            threads.append(threading.Thread(target=wait, args=(number, ready)))
            threads[-1].start()
            ready.wait(PATIENCE)
            clock.sleep(0.1)  # Until it is in the queue, which nothing reports.
        store.free(lease)
        for thread in threads:
            thread.join(PATIENCE)
        assert order == list(range(5))
