"""Locks with several holders, and with a limit that changes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, Reservation
from celery_singleton_lock.stores.store import Store
from tests.contract.store_contract.asking import (
    KEY,
    ME,
    TTL,
    ask,
    is_free,
    is_of,
    request,
    taken,
)
from tests.contract.store_contract.waiting import place
from tests.patience import until

#: A message that comes twice.
COPY = replace(ME, sending="s" * 32)


class LimitContract:
    """All holds count, whatever limit they were taken under; a Redlock has no limits."""

    def test_as_many_hold_it_as_the_limit_allows(self, store: Store) -> None:
        leases = [taken(store, holder=Holder(name), limit=3) for name in "abc"]
        assert len({lease.fence for lease in leases}) == 3
        assert isinstance(ask(store, limit=3), Held)
        assert store.renew(leases, timeout=1) == [True] * 3

    def test_newcomer_finds_what_was_taken_under_a_higher_limit(self, store: Store) -> None:
        leases = [taken(store, holder=Holder(name), limit=3) for name in "abc"]
        for lease in leases[:-1]:
            assert isinstance(ask(store), Held)
            assert store.free(lease)
        assert is_of(ask(store), leases[-1])
        assert store.renew([leases[-1]], timeout=1) == [True]
        assert store.free(leases[-1])
        assert isinstance(ask(store), Lease)

    @pytest.mark.parametrize("limit", [1, 2])
    def test_deploy_that_lowers_the_limit_waits_for_those_that_are_left(self, store: Store, limit: int) -> None:
        leases = [taken(store, holder=Holder(name), limit=5) for name in "abcd"]
        while len(leases) >= limit:
            assert isinstance(ask(store, limit=limit), Held), f"{len(leases)} hold it"
            assert store.renew(leases, timeout=1) == [True] * len(leases)
            assert store.free(leases.pop(len(leases) // 2))
        assert isinstance(ask(store, limit=limit), Lease)
        assert isinstance(ask(store, holder=ME, limit=limit), Held)
        assert store.renew(leases, timeout=1) == [True] * len(leases)

    def test_hold_that_ends_by_itself_makes_room_beside_those_that_are_renewed(self, store: Store) -> None:
        short, long = taken(store, limit=2, ttl=1.5), taken(store, holder=ME, limit=2)
        until(lambda: [held.owner for held in store.held(KEY)] == [long.owner], "the short one has ended")
        assert store.renew([short, long], timeout=1) == [False, True]
        assert isinstance(ask(store, holder=Holder("a third"), limit=2), Lease)

    def test_message_does_not_run_beside_itself(self, store: Store) -> None:
        others = [taken(store, holder=Holder(name), limit=3) for name in "ab"]
        mine = taken(store, holder=ME, limit=3)
        for other in others:
            store.free(other)
        assert is_of(ask(store, holder=replace(ME, pid=7)), mine)
        assert is_of(ask(store, holder=replace(ME, pid=7), limit=3), mine), "also if there is room"

    def test_message_that_waits_for_its_own_run_leaves_the_other_places_to_others(self, store: Store) -> None:
        running = taken(store, holder=COPY, limit=2)
        with place(store, holder=replace(COPY, pid=7), limit=2):
            assert isinstance(ask(store, waiting=True, limit=2), Lease)
            assert store.renew([running], timeout=1) == [True]

    def test_renewed_for_longer_than_the_first_ttl(self, store: Store) -> None:
        first, second = (taken(store, holder=Holder(name), limit=2, ttl=1.5) for name in "ab")
        store.free(first)
        until = clock.now() + 2.0
        while clock.now() < until:
            assert store.renew([second], timeout=1) == [True]
            clock.sleep(0.1)
        assert isinstance(ask(store), Held)

    def test_renewal_of_a_short_lease_hides_no_longer_one(self, store: Store) -> None:
        """A newcomer with a lower limit finds every hold, whichever was renewed last."""
        lasts = {"a": TTL, "b": 1.5, "c": TTL}
        first, short, _ = (taken(store, holder=Holder(name), limit=3, ttl=ttl) for name, ttl in lasts.items())
        assert store.renew([short], timeout=1) == [True]
        store.free(first)
        clock.sleep(1.6)
        assert isinstance(ask(store), Held)

    def test_attempt_that_is_kept_under_a_higher_limit_waits_for_those_that_run(self, store: Store) -> None:
        first = taken(store, limit=2)
        second, following = taken(store, holder=ME, limit=2), replace(ME, retries=3)
        store.free(second, reservation=Reservation(following, TTL))
        assert is_of(ask(store, holder=following), first)
        store.free(first)
        assert isinstance(ask(store), Held), "it is reserved"
        lease = taken(store, holder=following)
        assert store.free(lease)
        assert is_free(store), "nothing is left of the reservation"

    def test_raised_limit_has_room_at_once(self, store: Store) -> None:
        taken(store)
        assert isinstance(ask(store, holder=ME, limit=2), Lease)

    def test_hold_beyond_the_limit_can_be_freed(self, store: Store) -> None:
        first, _ = taken(store, limit=2), taken(store, limit=2, holder=ME)
        store.free(first)
        met = ask(store, holder=Holder("a third"))
        assert isinstance(met, Held)
        assert store.free(met.hold(KEY, ttl=TTL, limit=1))
        assert isinstance(ask(store), Lease)

    def test_places_that_are_freed_at_once_wake_a_waiter_each(self, store: Store) -> None:
        leases = [taken(store, holder=Holder(name), limit=2) for name in "ab"]
        waiters, heard = [request(holder=Holder(name), waiting=True, limit=2) for name in "cd"], set[str]()
        for waiter in waiters:
            assert isinstance(store.acquire(waiter), Held)
            store.mailbox.expect(waiter.key, waiter.name, partial(heard.add, waiter.name))
        for lease in leases:
            assert store.free(lease)
        until(lambda: len(heard) == 2)
        for waiter in waiters:
            store.mailbox.forget(waiter.name)

    def test_all_holds_that_were_given_up_are_freed(self, store: Store) -> None:
        taken(store, limit=3)
        ghosts = [taken(store, holder=Holder(name), limit=3).owner for name in "ab"]
        taken(store, holder=ME, limit=3, given_up=ghosts)
        assert isinstance(ask(store, limit=3, holder=Holder("c")), Lease)
        assert not is_free(store, 3)
