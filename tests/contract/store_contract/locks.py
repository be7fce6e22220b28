"""Taking, renewing and freeing a lock."""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import suppress
from dataclasses import replace

from celery_singleton_lock import clock
from celery_singleton_lock.holder import new_owner
from celery_singleton_lock.lease import Hold, Lease
from celery_singleton_lock.stores.base import Freeing, Held
from celery_singleton_lock.stores.store import Store
from tests.contract.store_contract.asking import (
    KEY,
    OTHER,
    PATIENCE,
    SHORT,
    TTL,
    ask,
    is_free,
    request,
    taken,
    until_free,
)

#: The ttl in seconds of a lease that is renewed once, and met between its first end and its second: enough time for a
#: slow machine.
RENEWED = 3.0


class LockContract:
    """There is one holder at a time, and it knows when it has lost the lock."""

    def test_free_lock_is_taken(self, store: Store) -> None:
        lease = taken(store)
        assert lease.held
        assert lease.fence > 0
        assert 0 < lease.remaining < TTL

    def test_held_lock_is_refused_and_names_its_holder(self, store: Store) -> None:
        taken(store)
        found = ask(store)
        assert isinstance(found, Held)
        assert found.holder == OTHER
        assert found.holder is not None
        assert found.holder.ttl == TTL, "the length of a renewal"
        assert found.holder.label == OTHER.label
        assert 0 < found.remaining <= TTL

    def test_another_key_is_free(self, store: Store) -> None:
        taken(store)
        assert isinstance(ask(store, key=f"{KEY}2"), Lease)

    def test_acquire_is_idempotent_by_owner(self, store: Store) -> None:
        owner = new_owner()
        first, second = taken(store, owner), taken(store, owner)
        assert second.fence >= first.fence
        assert isinstance(ask(store), Held)
        assert store.free(second)
        assert is_free(store), "it is one hold"

    def test_repeated_acquire_does_not_shorten_the_hold(self, store: Store) -> None:
        """The first of two tries may come last, after a renewal for longer."""
        lease = taken(store)
        taken(store, lease.owner, ttl=SHORT)
        (found,) = store.held(KEY)
        assert found.remaining > SHORT

    def test_holder_is_as_its_owner_has_said_last(self, store: Store) -> None:
        """A message passes its lock on to its next attempt, whatever it has stored as its end by then."""
        owner = new_owner()
        taken(store, owner)
        following = replace(OTHER, retries=1)
        taken(store, owner, holder=following)
        found = ask(store)
        assert isinstance(found, Held)
        assert found.holder == following

    def test_freed_lock_is_free(self, store: Store) -> None:
        assert store.free(taken(store))
        assert isinstance(ask(store), Lease)

    def test_freeing_twice_does_not_free_the_next_hold(self, store: Store) -> None:
        lease = taken(store)
        store.free(lease)
        taken(store)
        assert not store.free(lease)
        assert isinstance(ask(store), Held)

    def test_lock_that_is_still_held_is_freed_whatever_its_holder_believes(self, store: Store) -> None:
        lease = taken(store)
        lease.lose("the test said so")
        assert store.free(lease) == Freeing.NOW
        assert store.free(lease) == Freeing.NOT_OURS
        assert is_free(store)

    def test_stranger_frees_nothing(self, store: Store) -> None:
        lease, stranger = taken(store), Hold(KEY, new_owner(), ttl=TTL)
        assert not store.free(stranger)
        assert store.renew([stranger], timeout=1) == [False]
        assert store.renew([lease], timeout=1) == [True]

    def test_lease_ends_by_itself(self, store: Store) -> None:
        taken(store, ttl=SHORT)
        assert until_free(store).held

    def test_holder_stops_trusting_before_others_can_acquire(self, store: Store) -> None:
        lease = taken(store, ttl=SHORT)
        until_free(store)
        assert not lease.held

    def test_renewed_lease_lasts(self, store: Store) -> None:
        lease = taken(store, ttl=RENEWED)
        end = lease.trusted_until
        clock.sleep(RENEWED / 2)
        assert store.renew([lease], timeout=1) == [True]
        assert lease.trusted_until > end
        clock.sleep(RENEWED * 0.6)
        assert isinstance(ask(store), Held)

    def test_ended_lease_is_not_renewed(self, store: Store) -> None:
        lease = taken(store, ttl=SHORT)
        following = until_free(store)
        assert store.renew([lease, following], timeout=1) == [False, True]

    def test_freed_lease_is_not_brought_back_by_a_late_renewal(self, store: Store) -> None:
        lease = taken(store)
        store.free(lease)
        assert store.renew([lease], timeout=1) == [False]
        assert isinstance(ask(store), Lease)

    def test_many_leases_are_renewed_at_once(self, store: Store) -> None:
        leases = [taken(store, key=f"many:{{{number}}}") for number in range(450)]
        assert store.renew(leases, timeout=5) == [True] * 450
        assert all(store.free(lease) for lease in leases)

    def test_fences_grow(self, store: Store) -> None:
        fences = []
        for _ in range(20):
            lease = taken(store)
            fences.append(lease.fence)
            store.free(lease)
        assert fences == sorted(set(fences))

    def test_fence_grows_over_an_ended_lease(self, store: Store) -> None:
        first = taken(store, ttl=SHORT)
        assert until_free(store).fence > first.fence

    def test_no_update_is_lost(self, store: Store) -> None:
        """Threads raise an unguarded counter under the lock; the sum must be right."""
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
            worker.join(PATIENCE)
        assert counter == [threads * rounds]

    def test_closed_store_opens_again_when_it_is_used(self, store: Store) -> None:
        lease = taken(store)
        store.close()
        assert store.renew([lease], timeout=1) == [True]
        assert store.free(lease)

    def test_store_can_be_used_on_both_sides_of_a_fork(self, store: Store) -> None:
        lease = taken(store)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                met = store.acquire(request())
                beside = taken(store, key=f"{KEY}:of the child")
                os._exit(0 if isinstance(met, Held) and store.free(beside) else 1)
            os._exit(2)
        assert os.waitpid(pid, 0)[1] == 0
        assert store.renew([lease], timeout=1) == [True]
        assert store.free(lease)
        assert is_free(store)
