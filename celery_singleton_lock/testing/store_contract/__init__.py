"""The promises of every lock store, as tests: inherit them, and provide a fixture that opens your store.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path):
            store = MyStore(tmp_path / "locks")
            yield store
            store.close()

Each test gets a new store, in which nothing is held.
"""

from __future__ import annotations

import pytest

from celery_singleton_lock.stores.base import LockStore
from celery_singleton_lock.testing.store_contract.given_up import AbandonContract, GivenUpContract
from celery_singleton_lock.testing.store_contract.limits import LimitContract
from celery_singleton_lock.testing.store_contract.locks import LockContract
from celery_singleton_lock.testing.store_contract.records import RecordContract
from celery_singleton_lock.testing.store_contract.refusals import RefusalContract
from celery_singleton_lock.testing.store_contract.reservations import ReservationContract
from celery_singleton_lock.testing.store_contract.waiting import WaitingContract


class StoreContract(
    LockContract,
    WaitingContract,
    RecordContract,
    ReservationContract,
    RefusalContract,
    AbandonContract,
    GivenUpContract,
    LimitContract,
):
    """Tests of a `LockStore`, with pytest. Give the class a fixture `store`.

    Set `wakes_in_order` or `frees_beyond_the_limit` to False if your store does not promise these.
    """

    @pytest.fixture
    def store(self) -> LockStore:
        """The store, opened for one test."""
        raise NotImplementedError(f"{type(self).__name__} has no fixture 'store', which opens the store for a test")
