"""The store in `examples/sqlite_store` promises what every store does."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from celery_singleton_lock.errors import LockUnavailable
from celery_singleton_lock.stores import LockStore
from celery_singleton_lock.testing import StoreContract
from celery_singleton_lock.testing.store_contract.asking import KEY, request, taken, until_free
from examples.sqlite_store.store import SqliteStore
from tests.patience import LIMIT


class TestSqlite(StoreContract):
    wakes_in_order = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> LockStore:
        return SqliteStore(tmp_path / "locks")


def count(path: Path, rounds: int) -> None:
    store, counter = SqliteStore(path / "locks"), path / "counter"
    for _ in range(rounds):
        lease = until_free(store)
        counter.write_text(str(int(counter.read_text()) + 1))
        assert store.free(lease)


def test_no_update_of_another_process_is_lost(tmp_path: Path) -> None:
    (tmp_path / "counter").write_text("0")
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=count, args=(tmp_path, 10)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
    assert [process.exitcode for process in processes] == [0] * 3
    assert (tmp_path / "counter").read_text() == "30"


def test_unusable_file_is_reported_as_an_unavailable_lock(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "locks")
    lease = taken(store)
    (tmp_path / "locks").write_bytes(b"no database at all" * 100)
    with pytest.raises(LockUnavailable, match=r"not a database|malformed"):
        store.acquire(request())
    with pytest.raises(LockUnavailable):
        store.renew([lease], timeout=1)
    assert store.abandon(lease) is None
    assert lease.key == KEY
