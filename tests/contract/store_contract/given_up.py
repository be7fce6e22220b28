"""Owner tokens that were given up: their requests may still arrive, but take nothing."""

from __future__ import annotations

import threading

import pytest

from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.stores.store import Store
from tests.contract.store_contract.asking import (
    KEY,
    ME,
    PATIENCE,
    TTL,
    ask,
    is_free,
    is_of,
    request,
    taken,
    waited_for,
)

RECORD = Record(ME.message, b"record", 60.0)


class AbandonContract:
    """A caller that gives up without an answer abandons its owner token."""

    def test_lock_of_an_abandoned_owner_is_free(self, store: Store) -> None:
        assert store.abandon(taken(store)) is True
        assert is_free(store)

    def test_abandoning_what_was_never_taken_does_nothing(self, store: Store) -> None:
        hold = Hold(KEY, new_owner(), ttl=TTL)
        assert store.abandon(hold) is False
        assert store.abandon(hold) is False, "it may be repeated"

    def test_late_request_of_an_abandoned_owner_takes_nothing(self, store: Store) -> None:
        owner = new_owner()
        store.abandon(Hold(KEY, owner, ttl=TTL))
        with pytest.raises(LockUnavailable):
            ask(store, owner)
        assert is_free(store)

    def test_hold_of_another_is_left_alone(self, store: Store) -> None:
        lease = taken(store)
        assert store.abandon(Hold(KEY, new_owner(), ttl=TTL)) is False
        assert store.renew([lease], timeout=1) == [True]

    def test_waiter_is_woken_when_the_holder_is_abandoned(self, store: Store) -> None:
        lease = taken(store, holder=ME)
        assert isinstance(_waited_while(store, lambda: store.abandon(lease)), Lease)


class GivenUpContract:
    """A copy of the message names the owner token with which another delivery asked and got no answer."""

    def test_hold_of_a_given_up_owner_is_free_for_the_copy(self, store: Store) -> None:
        ghost = taken(store, holder=ME)
        assert isinstance(ask(store, holder=ME), Held)
        lease = taken(store, holder=ME, given_up=[new_owner(), ghost.owner])
        assert lease.fence > ghost.fence
        assert store.renew([ghost, lease], timeout=1) == [False, True]

    def test_late_request_of_an_owner_that_was_given_up_takes_nothing(self, store: Store) -> None:
        given_up = new_owner()
        lease = taken(store, holder=ME, given_up=[given_up])
        with pytest.raises(LockUnavailable):
            ask(store, given_up, holder=ME)
        store.free(lease)
        with pytest.raises(LockUnavailable):
            ask(store, given_up, holder=ME)
        assert is_free(store)

    def test_holds_of_others_are_not_freed(self, store: Store) -> None:
        other = taken(store)
        assert is_of(ask(store, holder=ME, given_up=[new_owner()]), other)

    def test_given_up_hold_is_freed_also_for_a_copy_of_a_finished_message(self, store: Store) -> None:
        store.free(taken(store, holder=ME), record=RECORD)
        ghost = taken(store, holder=ME)
        assert isinstance(ask(store, holder=ME, check_finished=True, given_up=[ghost.owner]), Record)
        assert is_free(store)

    def test_waiter_is_woken_if_the_copy_does_not_need_the_lock(self, store: Store) -> None:
        store.free(taken(store, holder=ME), record=RECORD)
        ghost = taken(store, holder=ME)
        found = _waited_while(store, lambda: ask(store, holder=ME, check_finished=True, given_up=[ghost.owner]))
        assert isinstance(found, Lease)

    def test_waiting_copy_gets_the_lock(self, store: Store) -> None:
        """The request that was given up may arrive while the copy waits."""
        first, asked = taken(store), request(holder=ME, waiting=True, given_up=[new_owner()])
        assert isinstance(store.acquire(asked), Held)
        with store.waiter(asked) as waiter:
            store.free(first)
            assert isinstance(waited_for(waiter), Lease)


def _waited_while(store: Store, act: object) -> object:
    """What a waiter for the lock gets during `act`."""
    found, asked = [], request(waiting=True)
    assert isinstance(store.acquire(asked), Held)
    with store.waiter(asked) as waiter:
        waits = threading.Thread(target=lambda: found.append(waited_for(waiter)))
        waits.start()
        act()  # type: ignore[operator]
        waits.join(PATIENCE)
    return found[0]
