"""Messages that are refused, and recorded as refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from celery_singleton_lock.holder import Holder
from celery_singleton_lock.lease import Lease
from celery_singleton_lock.stores.base import Held, Record, Reservation
from celery_singleton_lock.stores.store import Store
from tests.contract.store_contract.asking import KEY, ME, OTHER, TTL, ask, is_of, taken

REFUSED = Record(ME.message, b"refused by a", 60.0)


class RefusalContract:
    """A message is either refused or runs; if two copies refuse it, only one refusal counts."""

    def test_refused_message_is_finished(self, store: Store) -> None:
        taken(store)
        assert store.refuse(KEY, ME, REFUSED) is None
        record = ask(store, holder=ME, check_finished=True)
        assert isinstance(record, Record)
        assert record.content == REFUSED.content
        assert 0 < record.seconds <= 60

    def test_repeated_refusal_finds_itself(self, store: Store) -> None:
        assert store.refuse(KEY, ME, REFUSED) is None
        assert store.refuse(KEY, ME, REFUSED) is None

    def test_message_that_was_carried_out_is_not_refused(self, store: Store) -> None:
        store.free(taken(store, holder=ME), record=Record(ME.message, b"record", 60.0))
        found = store.refuse(KEY, ME, REFUSED)
        assert isinstance(found, Record)
        assert found.content == b"record"

    def test_refusal_by_another_copy_is_found(self, store: Store) -> None:
        store.refuse(KEY, ME, REFUSED._replace(content=b"refused by b"))
        found = store.refuse(KEY, ME, REFUSED)
        assert isinstance(found, Record)
        assert found.content == b"refused by b"

    def test_running_message_is_not_refused(self, store: Store) -> None:
        lease = taken(store, holder=replace(ME, pid=1))
        assert is_of(store.refuse(KEY, ME, REFUSED), lease)
        store.free(lease)
        assert isinstance(ask(store, holder=ME, check_finished=True), Lease), "nothing is left of the refusal"

    def test_message_for_which_the_lock_is_reserved_is_not_refused(self, store: Store) -> None:
        lease = taken(store, holder=replace(ME, retries=1))
        store.free(lease, reservation=Reservation(ME, TTL))
        assert isinstance(store.refuse(KEY, ME, REFUSED), Held)
        assert isinstance(ask(store, holder=ME, check_finished=True), Lease)

    @pytest.mark.parametrize(
        "other", [OTHER, replace(ME, retries=1), replace(ME, replaced=1), replace(ME, sending="x")]
    )
    def test_other_messages_may_run_meanwhile(self, store: Store, other: Holder) -> None:
        taken(store, holder=other)
        assert store.refuse(KEY, ME, REFUSED) is None
