"""The promises of every lock store, as tests. A class that inherits them has a fixture `store`: a new store for each
test, in which nothing is held."""

from __future__ import annotations

from tests.contract.store_contract.given_up import AbandonContract, GivenUpContract
from tests.contract.store_contract.locks import LockContract
from tests.contract.store_contract.records import RecordContract
from tests.contract.store_contract.refusals import RefusalContract
from tests.contract.store_contract.reservations import ReservationContract
from tests.contract.store_contract.waiting import WaitingContract


class StoreContract(
    LockContract,
    WaitingContract,
    RecordContract,
    ReservationContract,
    RefusalContract,
    AbandonContract,
    GivenUpContract,
):
    """What each store promises."""
