"""Locks that are reserved for the next attempt of a task."""

from __future__ import annotations

from dataclasses import replace

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, Record, Reservation
from celery_singleton_lock.stores.store import Store
from tests.contract.store_contract.asking import (
    KEY,
    ME,
    SHORT,
    TTL,
    ask,
    is_free,
    taken,
    until_free,
)

NEXT = Holder("my-task", 3)


def reserved(store: Store, seconds: float = TTL) -> Lease:
    """A freed lease, whose lock is reserved for the next attempt."""
    lease = taken(store, holder=ME)
    assert store.free(lease, reservation=Reservation(NEXT, seconds))
    return lease


class ReservationContract:
    """The next attempt gets the lock, and nobody else."""

    def test_only_the_next_attempt_gets_it(self, store: Store) -> None:
        lease = reserved(store)
        found = ask(store)
        assert isinstance(found, Held)
        assert found.holder == NEXT
        assert found.holder is not None
        assert found.holder.ttl == 0, "nobody renews it"
        following = taken(store, holder=replace(NEXT, pid=99))
        assert following.fence > lease.fence
        assert isinstance(ask(store), Held)
        assert store.free(following)
        assert isinstance(ask(store), Lease)

    def test_two_copies_of_the_next_attempt_do_not_both_get_it(self, store: Store) -> None:
        reserved(store)
        taken(store, holder=NEXT)
        assert isinstance(ask(store, holder=NEXT), Held)

    def test_reservation_does_not_last_forever(self, store: Store) -> None:
        reserved(store, SHORT)
        assert until_free(store).held

    def test_lost_lock_is_not_reserved(self, store: Store) -> None:
        lease = taken(store, holder=ME)
        store.free(lease)
        taken(store)
        assert not store.free(lease, reservation=Reservation(NEXT, TTL))
        assert isinstance(ask(store, holder=NEXT), Held)

    def test_nothing_is_reserved_for_a_message_that_was_carried_out_meanwhile(self, store: Store) -> None:
        """The lock was freed late: the message has ended in another way, and does not come again."""
        lease = taken(store, holder=ME)
        assert store.refuse(KEY, NEXT, Record(NEXT.message, b"done", 60.0)) is None
        assert store.free(lease, reservation=Reservation(NEXT, TTL))
        assert is_free(store)

    def test_lock_can_be_kept_after_the_end_without_a_holder(self, store: Store) -> None:
        """`lock_at_least_for`: the lock is reserved for the message itself, which ends with this very call."""
        lease = taken(store, holder=ME)
        assert store.free(lease, record=Record(ME.message, b"done", 60.0), reservation=Reservation(ME, TTL))
        assert isinstance(ask(store), Held)

    def test_lock_that_is_kept_after_a_message_is_not_for_its_copies(self, store: Store) -> None:
        """Its record may be gone, or there is none."""
        message = Holder("at its first attempt")
        assert store.free(taken(store, holder=message), reservation=Reservation(message, TTL))
        assert isinstance(ask(store, holder=message), Held)
