"""The records of finished messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from celery_singleton_lock import clock
from celery_singleton_lock.holder import Holder, new_owner
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, Record
from celery_singleton_lock.stores.store import Store
from tests.contract.store_contract.asking import (
    KEY,
    ME,
    SHORT,
    ask,
    is_free,
    request,
    taken,
    waited_for,
)

RECORD = Record(ME.message, b"record\n\x00\xff", 60.0)


def found_by_a_copy(store: Store, holder: Holder = ME, **more: Any) -> Lease | Held | Record:
    """What a copy of this holder's message finds."""
    return ask(store, holder=holder, check_finished=True, **more)


def content_found(store: Store, holder: Holder = ME, **more: Any) -> bytes:
    """The content of the record, which must exist."""
    record = found_by_a_copy(store, holder, **more)
    assert isinstance(record, Record)
    assert 0 < record.seconds <= 60
    return record.content


class RecordContract:
    """A copy of a message that was carried out finds the record, and takes no lock."""

    def test_copy_finds_the_record_and_takes_no_lock(self, store: Store) -> None:
        store.free(taken(store, holder=ME), record=RECORD)
        assert content_found(store) == RECORD.content
        assert isinstance(ask(store), Lease)

    def test_copy_finds_the_record_also_while_another_holds_the_lock(self, store: Store) -> None:
        store.free(taken(store, holder=ME), record=RECORD)
        taken(store)
        assert content_found(store) == RECORD.content

    def test_repeated_acquire_that_finds_a_record_keeps_no_lock(self, store: Store) -> None:
        """The answer to the first request was lost, and another copy has ended meanwhile."""
        owner = new_owner()
        taken(store, owner, holder=ME)
        store.remember(KEY, RECORD)
        assert isinstance(ask(store, owner, holder=ME, check_finished=True), Record)
        assert is_free(store)

    def test_repeated_acquire_that_finds_a_record_frees_the_lock_for_those_that_wait(self, store: Store) -> None:
        owner = new_owner()
        taken(store, owner, holder=ME)
        with store.waiter(request(waiting=True)) as waiter:
            assert isinstance(waiter.ask(), Held)
            store.remember(KEY, RECORD)
            assert isinstance(ask(store, owner, holder=ME, check_finished=True, waiting=True), Record)
            assert isinstance(waited_for(waiter), Lease)

    def test_copy_that_does_not_ask_for_the_record_takes_the_lock(self, store: Store) -> None:
        store.free(taken(store, holder=ME), record=RECORD)
        assert isinstance(ask(store, holder=ME), Lease)

    @pytest.mark.parametrize("change", [{"sending": "other"}, {"retries": 3}, {"replaced": 1}])
    def test_other_messages_have_no_record(self, store: Store, change: dict[str, Any]) -> None:
        store.free(taken(store, holder=ME), record=RECORD)
        assert isinstance(found_by_a_copy(store, replace(ME, **change)), Lease)

    def test_another_process_is_still_the_same_message(self, store: Store) -> None:
        store.free(taken(store, holder=ME), record=RECORD)
        assert content_found(store, Holder(ME.task_id, ME.retries, "elsewhere", 7)) == RECORD.content

    def test_record_is_stored_also_when_the_lock_was_lost(self, store: Store) -> None:
        lease = taken(store, holder=ME)
        store.free(lease)
        taken(store)
        assert not store.free(lease, record=RECORD)
        assert content_found(store) == RECORD.content
        assert isinstance(ask(store), Held)

    def test_record_is_forgotten(self, store: Store) -> None:
        store.free(taken(store, holder=ME), record=RECORD._replace(seconds=SHORT))
        assert isinstance(found_by_a_copy(store), Record)
        while isinstance(found_by_a_copy(store), Record):
            clock.sleep(SHORT / 10)

    def test_later_record_replaces_the_first(self, store: Store) -> None:
        lease = taken(store, holder=ME)
        store.free(lease, record=RECORD)
        store.free(lease, record=RECORD._replace(content=b"second"))
        assert content_found(store) == b"second"

    def test_record_that_somebody_else_stores_frees_nothing(self, store: Store) -> None:
        lease = taken(store)
        store.remember(KEY, RECORD)
        assert store.renew([lease], timeout=1) == [True]
        store.free(lease)
        assert content_found(store) == RECORD.content

    def test_records_are_replaced(self, store: Store) -> None:
        holders = [Holder(f"task {number}") for number in range(3)]
        for number, holder in enumerate(holders):
            store.free(taken(store, key=f"{KEY}:{number}"), record=Record(holder.message, b"long record", 60.0))
        short = [(f"{KEY}:{number}", Record(it.message, b"short", 60.0)) for number, it in enumerate(holders)]
        store.replace_records(short)
        for number, holder in enumerate(holders):
            assert content_found(store, holder, key=f"{KEY}:{number}") == b"short"

    def test_record_that_is_gone_stays_gone(self, store: Store) -> None:
        store.replace_records([(KEY, RECORD)])
        assert isinstance(found_by_a_copy(store), Lease)

    def test_holds_are_not_touched_when_records_are_replaced(self, store: Store) -> None:
        lease = taken(store, holder=ME)
        store.replace_records([(KEY, RECORD)])
        assert store.renew([lease], timeout=1) == [True]

    def test_many_records_are_replaced_at_once(self, store: Store) -> None:
        store.remember(KEY, RECORD)
        others = [(f"{KEY}:{number}", RECORD) for number in range(500)]
        store.replace_records([*others, (KEY, RECORD._replace(content=b"x"))])
        assert content_found(store) == b"x"

    def test_replacing_no_records_does_nothing(self, store: Store) -> None:
        store.replace_records([])
