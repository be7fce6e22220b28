"""What every store promises about owners that are given up, messages that are refused, and limits that change."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, LockRequest, Record, Reservation
from celery_singleton_lock.stores.store import Store

KEY = "contract:{late:1}"
TTL = 300.0
ME = Holder("my-task", 2, "worker@host", 42, 1000.0)
OTHER = Holder("other", 0, "elsewhere", 7, 1.0)
REFUSED = Record(ME.message, b"refused by a", 60.0)


def ask(store: Store, owner: str = "", **more: object) -> Lease | Held | Record:
    asked = {"ttl": TTL, "holder": OTHER, **more}
    return store.acquire(LockRequest(KEY, owner or new_owner(), **asked))  # type: ignore[arg-type]


def taken(store: Store, owner: str = "", **more: object) -> Lease:
    lease = ask(store, owner, **more)
    assert isinstance(lease, Lease)
    return lease


def holders(store: Store, limit: int = 1) -> list[str]:
    return [held.owner for held in store.held(KEY, limit=limit)]


def is_of(held: Held, lease: Lease) -> bool:
    """On a Redlock an owner is known by its beginning."""
    return held.owner[:28] == lease.owner[:28]


class TestLeft:
    """The record that somebody else leaves for a run that cannot."""

    def test_copy_finds_it(self, store: Store) -> None:
        lease = taken(store)
        store.remember(KEY, Record(ME.message, b"killed", 60.0))
        assert store.renew([lease], timeout=1.0) == [True], "it frees nothing"
        store.free(lease)
        found = ask(store, holder=ME, once=True)
        assert isinstance(found, Record)
        assert found.content == b"killed"


class TestAbandoned:
    def test_lock_is_free(self, store: Store) -> None:
        assert store.abandon(taken(store)) is True
        assert store.held(KEY) == []
        assert isinstance(ask(store), Lease)

    def test_lock_that_was_never_taken_is_nothing(self, store: Store) -> None:
        lease = Lease(KEY, new_owner(), ttl=TTL, fence=0, sent_at=clock.now())
        assert store.abandon(lease) is False
        assert store.abandon(lease) is False, "it may be said again"

    def test_what_arrives_later_takes_nothing(self, store: Store) -> None:
        owner = new_owner()
        store.abandon(Lease(KEY, owner, ttl=TTL, fence=0, sent_at=clock.now()))
        with pytest.raises(LockUnavailable):
            ask(store, owner)
        assert store.held(KEY) == []
        assert isinstance(ask(store), Lease)

    def test_hold_of_another_is_left_alone(self, store: Store) -> None:
        lease = taken(store)
        assert store.abandon(Lease(KEY, new_owner(), ttl=TTL, fence=0, sent_at=clock.now())) is False
        assert store.renew([lease], timeout=1.0) == [True]

    def test_waiter_is_woken(self, store: Store) -> None:
        lease = taken(store, holder=ME)
        owner, found = new_owner(), []
        assert isinstance(ask(store, owner, waiting=True), Held)
        with store.waiter(LockRequest(KEY, owner, ttl=TTL, holder=OTHER)) as turn:
            waiter = threading.Thread(target=lambda: found.append(turn.wait(60)))
            waiter.start()
            store.abandon(lease)
            waiter.join(30)
            while isinstance(found[-1], Held):
                found.append(turn.wait(60))
        assert isinstance(found[-1], Lease)

    def test_place_of_a_semaphore(self, store: Store) -> None:
        leases = [taken(store, holder=Holder(name), limit=3) for name in "abc"]
        store.abandon(Lease(KEY, leases[1].owner, ttl=TTL, fence=0, sent_at=clock.now(), limit=3))
        assert len(store.held(KEY, limit=3)) == 2
        assert taken(store, limit=3).slot == 1


class TestGivenUp:
    """A copy of the message names the owner that another delivery of it asked with, and got no answer."""

    def test_what_it_holds_is_free_for_the_copy(self, store: Store) -> None:
        ghost = taken(store, holder=ME)
        assert isinstance(ask(store, holder=ME), Held)
        lease = taken(store, holder=ME, given_up=[new_owner(), ghost.owner])
        assert lease.fence > ghost.fence
        assert store.renew([ghost, lease], timeout=1.0) == [False, True]

    def test_what_arrives_of_it_later_takes_nothing(self, store: Store) -> None:
        given_up = new_owner()
        lease = taken(store, holder=ME, given_up=[given_up])
        with pytest.raises(LockUnavailable):
            ask(store, given_up, holder=ME)
        store.free(lease)
        with pytest.raises(LockUnavailable):
            ask(store, given_up, holder=ME)
        assert store.held(KEY) == []

    def test_it_frees_nothing_of_others(self, store: Store) -> None:
        other = taken(store)
        found = ask(store, holder=ME, given_up=[new_owner()])
        assert isinstance(found, Held)
        assert is_of(found, other)

    def test_it_is_freed_also_for_a_copy_of_a_message_that_was_carried_out(self, store: Store) -> None:
        store.free(taken(store, holder=ME), record=Record(ME.message, b"record", 60.0))
        ghost = taken(store, holder=ME)
        assert isinstance(ask(store, holder=ME, once=True, given_up=[ghost.owner]), Record)
        assert store.held(KEY) == []

    def test_waiter_is_woken_where_the_copy_does_not_need_the_lock(self, store: Store) -> None:
        store.free(taken(store, holder=ME), record=Record(ME.message, b"record", 60.0))
        ghost = taken(store, holder=ME)
        owner, found = new_owner(), []
        assert isinstance(ask(store, owner, waiting=True), Held)
        with store.waiter(LockRequest(KEY, owner, ttl=TTL, holder=OTHER)) as turn:
            waiter = threading.Thread(target=lambda: found.append(turn.wait(60)))
            waiter.start()
            ask(store, holder=ME, once=True, given_up=[ghost.owner])
            waiter.join(30)
            while isinstance(found[-1], Held):
                found.append(turn.wait(60))
        assert isinstance(found[-1], Lease)

    def test_it_is_freed_in_each_place_of_a_semaphore(self, store: Store) -> None:
        taken(store, limit=3)
        ghosts = [taken(store, holder=Holder(name), limit=3).owner for name in "ab"]
        lease = taken(store, holder=ME, limit=3, given_up=ghosts)
        assert lease.slot == 1
        assert len(store.held(KEY, limit=3)) == 2

    def test_waiting_copy_gets_it(self, store: Store) -> None:
        """What it has given up may arrive while it waits."""
        first, given_up, owner = taken(store), new_owner(), new_owner()
        assert isinstance(ask(store, owner, holder=ME, waiting=True, given_up=[given_up]), Held)
        with store.waiter(LockRequest(KEY, owner, ttl=TTL, holder=ME, given_up=[given_up])) as turn:
            store.free(first)
            found = turn.wait(60)
            while isinstance(found, Held):
                found = turn.wait(60)
        assert isinstance(found, Lease)


class TestRefused:
    def test_message_is_done_from_then_on(self, store: Store) -> None:
        taken(store)
        assert store.refuse(KEY, ME, REFUSED) is None
        done = ask(store, holder=ME, once=True)
        assert isinstance(done, Record)
        assert done.content == REFUSED.content
        assert 0 < done.seconds <= 60

    def test_repeated_call_finds_its_own(self, store: Store) -> None:
        assert store.refuse(KEY, ME, REFUSED) is None
        assert store.refuse(KEY, ME, REFUSED) is None

    def test_message_that_was_carried_out_is_not_refused(self, store: Store) -> None:
        store.free(taken(store, holder=ME), record=Record(ME.message, b"record", 60.0))
        found = store.refuse(KEY, ME, REFUSED)
        assert isinstance(found, Record)
        assert found.content == b"record"

    def test_message_that_another_copy_refused(self, store: Store) -> None:
        store.refuse(KEY, ME, REFUSED._replace(content=b"refused by b"))
        found = store.refuse(KEY, ME, REFUSED)
        assert isinstance(found, Record)
        assert found.content == b"refused by b"

    @pytest.mark.parametrize("limit", [1, 3])
    def test_message_that_runs_is_not_refused(self, store: Store, limit: int) -> None:
        for number in range(limit - 1):
            taken(store, holder=Holder(f"task-{number}"), limit=limit)
        lease = taken(store, holder=replace(ME, pid=1), limit=limit)
        found = store.refuse(KEY, ME, REFUSED, limit=limit)
        assert isinstance(found, Held)
        assert is_of(found, lease)
        store.free(lease)
        assert isinstance(ask(store, holder=ME, once=True, limit=limit), Lease), "nothing is left of the refusal"

    def test_message_for_which_the_lock_is_kept_is_not_refused(self, store: Store) -> None:
        lease = taken(store, holder=replace(ME, retries=1))
        store.free(lease, reservation=Reservation(ME, TTL))
        assert isinstance(store.refuse(KEY, ME, REFUSED), Held)
        assert isinstance(ask(store, holder=ME, once=True), Lease)

    @pytest.mark.parametrize(
        "other", [OTHER, replace(ME, retries=1), replace(ME, replaced=1), replace(ME, sending="x")]
    )
    def test_other_messages_run_beside_it(self, store: Store, other: Holder) -> None:
        taken(store, holder=other)
        assert store.refuse(KEY, ME, REFUSED) is None

    def test_message_that_runs_in_a_place_beyond_the_limit_is_not_refused(self, store: Store) -> None:
        taken(store, limit=2)
        taken(store, holder=replace(ME, pid=1), limit=2)
        assert isinstance(store.refuse(KEY, ME, REFUSED), Held)

    def test_of_two_copies_one_refuses_or_runs(self, store: Store) -> None:
        found: list[object] = []
        start = threading.Barrier(2)

        def run() -> None:
            start.wait()
            with suppress(LockUnavailable):  # No majority: of a Redlock nobody may win.
                found.append(ask(store, holder=me, once=True))

        def refuse() -> None:
            start.wait()
            with suppress(LockUnavailable):
                found.append(store.refuse(KEY, me, mark))

        for number in range(10):
            me = Holder(f"task-{number}")
            mark = Record(me.message, b"refused", 60.0)
            found.clear()
            threads = [threading.Thread(target=each) for each in (run, refuse)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            leases = [it for it in found if isinstance(it, Lease)]
            assert len(leases) + found.count(None) <= 1, found
            assert None in found or not any(isinstance(it, Record) for it in found), (
                "a refusal is told, and there is none"
            )
            for lease in leases:
                store.free(lease)


class TestSettled:
    def test_marks_are_replaced(self, store: Store) -> None:
        marks = [Record(f"message {number}:0.0", b"long record", 60.0) for number in range(3)]
        for number, mark in enumerate(marks):
            key = f"{KEY}:{number}"
            lease = store.acquire(LockRequest(key, new_owner(), ttl=TTL, holder=OTHER))
            assert isinstance(lease, Lease)
            store.free(lease, record=mark)
        settled = [(f"{KEY}:{number}", mark._replace(content=b"short")) for number, mark in enumerate(marks)]
        store.replace_records(settled)
        for key, _ in settled:
            (mark,) = store.inspect(key).records
            assert mark.content == b"short"
            assert 0 < mark.seconds <= 60

    def test_mark_that_is_gone_stays_gone(self, store: Store) -> None:
        store.replace_records([(KEY, REFUSED)])
        assert store.inspect(KEY).records == ()

    def test_holds_are_not_touched(self, store: Store) -> None:
        lease = taken(store, holder=ME)
        store.replace_records([(KEY, REFUSED)])
        assert store.renew([lease], timeout=1.0) == [True]

    def test_many_at_once(self, store: Store) -> None:
        store.refuse(KEY, ME, REFUSED)
        store.replace_records(
            [*[(f"{KEY}:{number}", REFUSED) for number in range(500)], (KEY, REFUSED._replace(content=b"x"))]
        )
        (mark,) = store.inspect(KEY).records
        assert mark.content == b"x"

    def test_nothing(self, store: Store) -> None:
        store.replace_records([])


class TestHeir:
    def test_heir_that_was_carried_out_meanwhile_keeps_nothing(self, store: Store) -> None:
        """A release that is said late: its heir's message found another way to run, and does not come again."""
        lease, following = taken(store, holder=ME), replace(ME, retries=3)
        assert store.refuse(KEY, following, Record(following.message, b"done", 60.0)) is None
        assert store.free(lease, reservation=Reservation(following, TTL))
        assert store.held(KEY) == []

    def test_what_is_kept_after_the_end_for_nobody_is_kept(self, store: Store) -> None:
        """`lock_at_least_for`: the heir is the message itself, which is done by this very release."""
        lease = taken(store, holder=ME)
        assert store.free(lease, record=Record(ME.message, b"done", 60.0), reservation=Reservation(ME, TTL))
        assert isinstance(ask(store), Held)


class TestLoweredLimit:
    """Whatever is held counts, whoever's limit it was taken under."""

    def test_newcomer_finds_what_was_taken_under_a_higher_limit(self, store: Store) -> None:
        leases = [taken(store, holder=Holder(name), limit=3) for name in "abc"]
        for lease in leases[:-1]:
            found = ask(store)
            assert isinstance(found, Held)
            assert store.free(lease)
        found = ask(store)
        assert isinstance(found, Held)
        assert is_of(found, leases[-1])
        assert store.renew([leases[-1]], timeout=1.0) == [True]
        assert store.free(leases[-1])
        assert taken(store).slot == 0

    def test_each_of_a_semaphore_counts(self, store: Store) -> None:
        leases = [taken(store, holder=Holder(name), limit=5) for name in "abcde"]
        for lease in leases[:3]:
            store.free(lease)
        assert isinstance(ask(store, limit=2), Held), "two are there, in other places"
        store.free(leases[3])
        assert taken(store, limit=2).slot == 0
        assert isinstance(ask(store, holder=ME, limit=2), Held)

    def test_message_does_not_run_beside_itself(self, store: Store) -> None:
        others = [taken(store, holder=Holder(name), limit=3) for name in "ab"]
        mine = taken(store, holder=ME, limit=3)
        for other in others:
            store.free(other)
        found = ask(store, holder=replace(ME, pid=7))
        assert isinstance(found, Held)
        assert is_of(found, mine)

    def test_look_shows_them(self, store: Store) -> None:
        for name in "abc":
            taken(store, holder=Holder(name), limit=3)
        assert [held.slot for held in store.held(KEY)] == [0, 1, 2]
        assert len(list(store.all_held("contract"))) == 3

    def test_renewed_for_longer_than_the_first_ttl(self, store: Store) -> None:
        first, second = (taken(store, holder=Holder(name), limit=2, ttl=0.5) for name in "ab")
        store.free(first)
        until = clock.now() + 1.0
        while clock.now() < until:
            assert store.renew([second], timeout=1.0) == [True]
            clock.sleep(0.1)
        assert isinstance(ask(store), Held)

    def test_what_is_kept_there_moves_to_within_the_limit(self, store: Store) -> None:
        first = taken(store, limit=2)
        second, following = taken(store, holder=ME, limit=2), replace(ME, retries=3)
        store.free(second, reservation=Reservation(following, TTL))
        found = ask(store, holder=following)
        assert isinstance(found, Held)
        assert is_of(found, first)
        store.free(first)
        assert isinstance(ask(store), Held), "it is kept"
        heir = taken(store, holder=following)
        assert heir.slot == 0
        assert [is_of(held, heir) for held in store.held(KEY)] == [True]

    def test_waiter_gets_its_turn(self, store: Store) -> None:
        leases = [taken(store, holder=Holder(name), limit=2) for name in "ab"]
        owner = new_owner()
        found = ask(store, owner, waiting=True)
        with store.waiter(LockRequest(KEY, owner, ttl=TTL, holder=OTHER)) as turn:
            store.free(leases[0])
            assert isinstance(turn.wait(0.1), Held)
            store.free(leases[1])
            while isinstance(found, Held):
                found = turn.wait(60)
        assert isinstance(found, Lease)

    def test_raised_limit_has_room_at_once(self, store: Store) -> None:
        taken(store)
        assert taken(store, holder=ME, limit=2).slot == 1

    def test_given_up_owner_is_freed_there(self, store: Store) -> None:
        first, ghost = taken(store, limit=2), taken(store, holder=ME, limit=2)
        store.free(first)
        assert taken(store, holder=ME, given_up=[ghost.owner]).slot == 0
        assert len(store.held(KEY)) == 1


class TestBeyondTheLimit:
    """A hold that was taken under a higher limit, and met under a lower one."""

    def test_it_can_be_freed(self, store: Store, request: pytest.FixtureRequest) -> None:
        if "redlock" in request.node.name:
            pytest.skip("it ends with its lease there")
        first, _ = taken(store, limit=2), taken(store, limit=2, holder=ME)
        store.free(first)
        met = ask(store, holder=Holder("a third"))
        assert isinstance(met, Held)
        assert store.free(met.hold(KEY, ttl=TTL, limit=1))
        assert isinstance(ask(store), Lease)
