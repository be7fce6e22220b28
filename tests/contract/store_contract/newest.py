"""Messages of a key of which only the newest should run: for stores that know the order in which they came.

Inherit it beside `StoreContract`. A Redlock need not promise any of this.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Arrival, Held, Record, Reservation, Superseded
from celery_singleton_lock.stores.store import Store
from tests.contract.store_contract.asking import TTL, ask, taken

FIRST, SECOND, THIRD = (Holder(name, pid=1, sending=f"{name}'s") for name in ("first", "second", "third"))


#: The task in whose order the messages come.
TASK = "a task"

#: Holders that newer messages of their order stop.
STOPPABLE = [replace(holder, order=Arrival(None, TTL, TASK).order) for holder in (FIRST, SECOND, THIRD)]


def come(
    store: Store, holder: Holder, number: int | None = None, task: str = TASK, stops: bool = False, **more: Any
) -> Lease | Held | Record:
    """Ask for the lock as a copy of the holder's message; `number` is the number that the message carries."""
    return ask(store, holder=holder, arrival=Arrival(number, TTL, task, stops), **more)


def told(store: Store, lease: Lease) -> str | None:
    """For which task a holder must stop, as it learns from a renewal; it still has the lock."""
    assert store.renew([lease], timeout=1) == [True]
    return lease.superseded_by


class NewestContract:
    """Older messages do not run after the newest has come."""

    def test_newest_waits_and_knows_its_number(self, store: Store) -> None:
        running = come(store, FIRST)
        assert isinstance(running, Lease)
        second, third = come(store, SECOND), come(store, THIRD)
        assert [type(found) for found in (second, third)] == [Held, Held]
        assert isinstance(second, Held)
        assert isinstance(third, Held)
        assert (second.arrived or 0) < (third.arrived or 0)
        assert second.holder == FIRST

    def test_older_message_is_superseded_while_the_lock_is_held(self, store: Store) -> None:
        come(store, FIRST)
        come(store, SECOND)
        come(store, THIRD)
        found = come(store, SECOND)
        assert isinstance(found, Superseded)
        assert (found.by, found.holder) == ("third", FIRST)

    def test_older_message_is_superseded_when_the_lock_is_free(self, store: Store) -> None:
        running = come(store, FIRST)
        come(store, SECOND)
        come(store, THIRD)
        assert isinstance(running, Lease)
        store.free(running)
        found = come(store, SECOND)
        assert isinstance(found, Superseded)
        assert (found.by, found.owner) == ("third", "")
        assert isinstance(come(store, THIRD), Lease)

    def test_another_task_under_the_same_lock_supersedes_nobody(self, store: Store) -> None:
        """Another task does other work."""
        running = come(store, FIRST)
        assert type(come(store, SECOND)) is Held
        assert type(come(store, THIRD, task="another one")) is Held
        assert isinstance(running, Lease)
        store.free(running)
        following = come(store, SECOND)
        assert isinstance(following, Lease)
        store.free(following)
        assert isinstance(come(store, THIRD, task="another one"), Lease)

    def test_number_from_the_future_is_the_time(self, store: Store) -> None:
        """A sender may write any number."""
        come(store, FIRST)
        come(store, SECOND, 2**53 - 1)
        third = come(store, THIRD)
        assert isinstance(third, Held)
        assert (third.arrived or 0) < 2**52
        assert isinstance(come(store, SECOND), Superseded)

    def test_holder_beside_which_another_task_runs_is_to_stop(self, store: Store) -> None:
        """That task's limit is higher, and its lease ends sooner."""
        running = come(store, STOPPABLE[0])
        beside = taken(store, limit=2, ttl=TTL / 2)
        assert isinstance(come(store, STOPPABLE[1], stops=True), Held)
        assert isinstance(running, Lease)
        assert told(store, running) == "second"
        assert told(store, beside) is None

    def test_copy_is_not_a_newcomer(self, store: Store) -> None:
        come(store, FIRST)
        come(store, SECOND)
        come(store, THIRD)
        for _ in range(3):
            assert isinstance(come(store, SECOND), Superseded)
            assert type(come(store, THIRD)) is Held

    def test_retry_has_the_lock_that_was_kept_for_it(self, store: Store) -> None:
        running, following = come(store, FIRST), replace(FIRST, retries=1, pid=0)
        come(store, SECOND)
        assert isinstance(running, Lease)
        store.free(running, reservation=Reservation(following, TTL))
        assert type(come(store, SECOND)) is Held
        assert isinstance(come(store, following), Lease)

    def test_numbers_give_the_order_if_the_store_has_forgotten_it(self, store: Store) -> None:
        """As after a restart without memory: the messages carry their numbers."""
        come(store, FIRST, key="earlier:{1}")
        second, third = come(store, SECOND, key="earlier:{1}"), come(store, THIRD, key="earlier:{1}")
        assert isinstance(second, Held)
        assert isinstance(third, Held)
        running = come(store, THIRD, third.arrived)
        assert isinstance(running, Lease)
        assert isinstance(come(store, SECOND, second.arrived), Superseded)

    def test_holder_learns_for_which_task_it_must_stop(self, store: Store) -> None:
        first, second, third = STOPPABLE
        running = come(store, first, stops=True)
        assert isinstance(running, Lease)
        assert told(store, running) is None
        found = come(store, second, stops=True)
        assert isinstance(found, Held)
        assert found.holder == FIRST
        assert found.holder.superseded_by == "second"
        assert told(store, running) == "second"
        assert type(come(store, third, stops=True)) is Held
        assert told(store, running) == "second"

    def test_holder_of_another_order_is_not_stopped(self, store: Store) -> None:
        """A holder of another task, or without an order, or with another policy: the newcomer waits."""
        second, other = STOPPABLE[1], replace(THIRD, order=Arrival(None, TTL, "another one").order)
        for holder in (FIRST, other):
            running = taken(store, holder=holder)
            found = come(store, second, stops=True)
            assert isinstance(found, Held)
            assert found.holder is not None
            assert found.holder.superseded_by is None
            assert told(store, running) is None
            store.free(running)

    def test_holder_with_a_label_learns_that_it_must_stop(self, store: Store) -> None:
        running = come(store, replace(STOPPABLE[0], label='tenant [7], "x"]]'), stops=True)
        assert isinstance(running, Lease)
        assert told(store, running) is None
        come(store, STOPPABLE[1], stops=True)
        assert told(store, running) == "second"

    def test_what_is_kept_for_an_older_one_is_taken(self, store: Store) -> None:
        first, second, _ = STOPPABLE
        running, following = come(store, first, stops=True), replace(first, retries=1, pid=0)
        assert isinstance(running, Lease)
        store.free(running, reservation=Reservation(following, TTL))
        newest = come(store, second, stops=True)
        assert isinstance(newest, Lease)
        assert newest.fence > running.fence
        assert isinstance(come(store, following, stops=True), Superseded)
        assert told(store, newest) is None
